"""lightning_fedssl: its trainer, data module and FedAvg with default settings, without files and evaluation.

python benchmarks/peers/ours.py --network lr
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import warnings

import numpy as np
import torch
import workload
from pacer import Pacer
from torch import nn

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest
from lightning_fedssl.run import TrainerView
from lightning_fedssl.trainer import FederatedTrainer

SPEC = DatasetSpec("cifar10", workload.CLASSES, workload.SHAPE, (0.0,) * 3, (1.0,) * 3, tuple("abcdefghij"))


class Blocks(Partition):
    """Client i holds block i modulo the number of blocks."""

    def split(self, asked: SplitRequest, generator: np.random.Generator) -> FederatedSplit:  # noqa: D102
        rows, nobody = torch.arange(len(asked.labels)), torch.zeros(0, dtype=torch.int64)
        clients = [ClientIndices(rows[workload.client(number)], nobody) for number in range(asked.num_clients)]
        return FederatedSplit(asked.seed, nobody, clients)


class Data(FederatedDataModule):
    """The workload's images; a few of them are the test images."""

    def __init__(self) -> None:
        super().__init__(
            "cifar10", num_clients=workload.CLIENTS, num_labels="all", label_location="clients", partition=Blocks(),
            client_batch_size=workload.BATCH, validation=0, weak="none", strong="none", normalize=False,
        )  # fmt: skip
        self.spec = SPEC

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        pixels, labels = map(torch.from_numpy, workload.images())
        return SPEC, ImageSplit(pixels, labels), ImageSplit(pixels[:10], labels[:10])


class Pause(FederatedCallback):
    """Waits before each round, on rank 0; the others wait for it."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.pacer = Pacer(self._loss)

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Wait."""
        self.algorithm = algorithm
        if trainer.is_global_zero:
            self.pacer.pause()
        trainer.gather(None)  # a barrier of gloo would take longer

    def _loss(self) -> float:
        state = {name.removeprefix("network."): t for name, t in self.algorithm.server.model().items()}
        self.network.load_state_dict(state)
        return workload.loss(self.network)


def main() -> None:
    """Train until the benchmark ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", required=True, help="lr or cnn")
    parser.add_argument("--devices", type=int, default=1, help="ranks")
    parser.add_argument("--clients_at_once", type=int)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--channels_last", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    network = workload.network(arguments.network)
    sgd = functools.partial(torch.optim.SGD, lr=workload.rate(arguments.network))
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            max_rounds=10**6, clients_per_round=workload.COHORT, accelerator="cpu", devices=arguments.devices,
            precision=arguments.precision, channels_last=arguments.channels_last, logger=False,
            clients_at_once=arguments.clients_at_once or "auto",
            callbacks=[Pause(network), FederatedCheckpoint(every_n_rounds=10**6)], enable_progress_bar=False,
            default_root_dir=folder,
        ).fit(FedAvg(network=network, optimizer=sgd), Data())  # fmt: skip


if __name__ == "__main__":
    main()
