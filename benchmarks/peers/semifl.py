"""A SemiFL round with this package, and the same round implemented client by client in plain PyTorch.

The plain implementation deep-copies the global model for each client, computes the views batch by batch, and averages a
list of models at the end. With ``--variant plain`` both use the same random numbers and must give the same weights:
``--check`` trains two rounds of both in float64 and reports the largest difference. With ``--variant authors-setting``
this package runs everything that a round of the authors' code does (``semifl_authors.py``).

    python benchmarks/peers/semifl.py --variant plain
    python benchmarks/peers/semifl.py --check
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from pacer import Pacer
from semifl_setting import BATCH, CLIENTS, COHORT, EPOCHS, LABELS, SERVER_MOMENTUM, STEPS, TEST_IMAGES, images
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.models import CNN, WideResNet
from lightning_fedssl.run import TrainerView
from lightning_fedssl.trainer import FederatedTrainer

SWEEP = 250
MIXUP_ALPHA = 0.75
CLIP = 1.0
SPEC = DatasetSpec("cifar10", 10, (3, 32, 32), (0.5,) * 3, (0.25,) * 3, tuple("abcdefghij"))
SGD = functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)


class Data(FederatedDataModule):
    """Random images of ten classes, each with its own bright square."""

    def __init__(self, validation: Literal["test"] | int = 0, strong: str = "auto") -> None:
        super().__init__(
            "cifar10", num_clients=CLIENTS, num_labels=LABELS, server_batch_size=BATCH, client_batch_size=BATCH,
            validation=validation, strong=strong,
        )  # fmt: skip
        self.spec = SPEC

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        pixels, labels = map(torch.from_numpy, images())
        end = len(labels) - TEST_IMAGES
        return SPEC, ImageSplit(pixels[:end], labels[:end]), ImageSplit(pixels[end:], labels[end:])


def network(norm: Literal["batch", "static_batch"]) -> nn.Module:
    """The network with the initial weights of the trainer."""
    algorithm = SemiFL(network=functools.partial(CNN, norm=norm), num_classes=10, in_shape=(3, 32, 32))
    algorithm.configure_model()
    return algorithm.network


class PlainSemiFL:
    """SemiFL from the paper and the authors' code, without the forward passes of that code whose results are not used.

    Args:
        dtype: Of weights and views.
        epochs: Local epochs, of clients and server.
    """

    def __init__(self, dtype: torch.dtype, epochs: int) -> None:
        self.dtype, self.epochs = dtype, epochs
        self.data = Data()
        self.data.setup("fit")
        self.server = network("batch").to(dtype)
        self.server_optimizer = SGD(self.server.parameters())
        self.momenta: list[Tensor] = []
        self.kept: dict[int, Any] = {}
        for layer in self.server.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = None  # a plain mean over batches
        self.measure_statistics()

    def round(self, round_index: int) -> None:
        """One round."""
        drawn = sampling.cohort(0, round_index, CLIENTS, COHORT)
        self.average([self.train_client(self.data.local_data(k, round_index, self.dtype)) for k in drawn])
        self.train_server(self.data.local_data(sampling.SERVER, round_index, self.dtype))
        self.measure_statistics()

    def train_client(self, data: LocalData) -> nn.Module:
        """Label the images with the global model, then train on fix and mix batches."""
        model = copy.deepcopy(self.server)
        labels = self.pseudo_labels(model, data)
        optimizer = SGD(model.parameters())
        if data.party in self.kept:
            optimizer.load_state_dict(self.kept[data.party])
        model.train()
        for epoch in range(self.epochs):
            for x_strong, x_weak, y, x_mix, y_mix, ratio in self.batches(data, labels, epoch):
                logits = model(ratio * x_weak + (1 - ratio) * x_mix)
                mixed = ratio * F.cross_entropy(logits, y) + (1 - ratio) * F.cross_entropy(logits, y_mix)
                self.step(model, optimizer, F.cross_entropy(model(x_strong), y) + mixed)
        self.kept[data.party] = optimizer.state_dict()
        return model

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """A step with a clipped gradient."""
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    @torch.no_grad()
    def pseudo_labels(self, model: nn.Module, data: LocalData) -> Tensor:
        """The global model's class of every image; all labels are used, so that the work is always the same."""
        model.eval()
        parts = enumerate(data.unlabeled.split(SWEEP))
        logits = [model(data.weak(part, "labeling", start=SWEEP * number)) for number, part in parts]
        return torch.cat(logits).argmax(1)

    def batches(self, data: LocalData, labels: Tensor, epoch: int) -> Iterator[tuple[Any, ...]]:
        """Strong and weak views, labels, the images to mix in with their labels, and the mixing ratio."""
        count = len(data.unlabeled)
        order = data.permutation(count, "order", epoch)
        mix = torch.from_numpy(data.rng("mix rows", epoch).integers(count, size=count))
        ratios = data.rng("ratio", epoch).beta(MIXUP_ALPHA, MIXUP_ALPHA, size=-(-count // BATCH))
        for number, ratio in enumerate(ratios):
            start = number * BATCH
            rows, others = order[start : start + BATCH], mix[start : start + BATCH]
            x, x_other = data.unlabeled[rows], data.unlabeled[others]
            strong = data.strong(x, "strong", epoch, start=start)
            weak = data.weak(x, "weak", epoch, start=start)
            yield strong, weak, labels[rows], data.weak(x_other, "mix", epoch, start=start), labels[others], ratio

    @torch.no_grad()
    def average(self, models: list[nn.Module]) -> None:
        """Server momentum on the mean of the clients' models."""
        for i, parameter in enumerate(self.server.parameters()):
            mean = torch.stack([list(model.parameters())[i] for model in models]).mean(0)
            step = parameter - mean
            if len(self.momenta) <= i:
                self.momenta.append(step)
            else:
                self.momenta[i] = SERVER_MOMENTUM * self.momenta[i] + step
            parameter.sub_(self.momenta[i])

    def train_server(self, data: LocalData) -> None:
        """Fine-tune on the labelled images."""
        self.server.train()
        for epoch in range(self.epochs):
            order = data.permutation(LABELS, "labeled", epoch)
            for start in range(0, LABELS, BATCH):
                rows = order[start : start + BATCH]
                x = data.weak(data.labeled[rows], "labeled", epoch, start=start)
                self.step(self.server, self.server_optimizer, F.cross_entropy(self.server(x), data.labels[rows]))

    @torch.no_grad()
    def measure_statistics(self) -> None:
        """Static batch norm on the labelled images."""
        data = self.data.local_data(sampling.SERVER, 1, self.dtype)
        for layer in self.server.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
        self.server.train()
        for part in data.labeled.sort().values.split(SWEEP):
            self.server(data.plain(part))


def semifl(epochs: int, network: type[nn.Module] = CNN, **size: int) -> SemiFL:
    """This package's SemiFL with the same settings, and a network of this size."""
    return SemiFL(
        network=functools.partial(network, norm="static_batch", **size), optimizer=SGD, threshold=0.0,
        client_epochs=epochs, server_epochs=epochs, gradient_clip_norm=CLIP, mixup_alpha=MIXUP_ALPHA,
        aggregation_optimizer=functools.partial(torch.optim.SGD, lr=1, momentum=SERVER_MOMENTUM),
    )  # fmt: skip


def fit(algorithm: SemiFL, rounds: int, precision: Any, *callbacks: FederatedCallback) -> None:
    """Train with this package's trainer, without files."""
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            max_rounds=rounds, clients_per_round=COHORT, accelerator="cpu", devices=1, precision=precision,
            logger=False, callbacks=[*callbacks, FederatedCheckpoint(every_n_rounds=rounds)],
            enable_progress_bar=False, default_root_dir=folder,
        ).fit(algorithm, Data())  # fmt: skip


def fit_in_the_authors_setting(*callbacks: FederatedCallback) -> None:
    """Train as the authors' main program does: with evaluation, logging and a checkpoint in every round."""
    algorithm = semifl(EPOCHS, WideResNet, depth=10, widen_factor=1)
    statistics, checkpoint = StaticBatchNorm(source="pooled"), FederatedCheckpoint(every_n_rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            max_rounds=10**6, clients_per_round=COHORT, accelerator="cpu", devices=1,
            callbacks=[*callbacks, statistics, checkpoint], enable_progress_bar=False, default_root_dir=folder,
        ).fit(algorithm, Data("test", strong="semifl"))  # fmt: skip


class Pause(FederatedCallback):
    """Pauses before each round, and checks the number of training steps of the round before it."""

    def __init__(self) -> None:
        self.pacer = Pacer(self._loss)
        self.steps = 0

    def on_round_start(self, trainer: TrainerView, algorithm: Any) -> None:
        """Wait."""
        if trainer.round_index > 1 and self.steps != STEPS:
            raise SystemExit(f"a round had {self.steps} training steps instead of {STEPS}")
        self.trainer, self.steps = trainer, 0
        self.pacer.pause()

    def on_client_batch_end(self, trainer: TrainerView, algorithm: Any, step: int) -> None:
        """Count a step of a client."""
        self.steps += 1

    def on_server_batch_end(self, trainer: TrainerView, algorithm: Any, step: int) -> None:
        """Count a step of the server."""
        self.steps += 1

    def _loss(self) -> float:
        return float(self.trainer.callback_metrics.get("val/loss", float("nan")))


def difference() -> float:
    """The largest difference of a weight or statistic after two rounds of one epoch in float64."""
    algorithm, plain = semifl(1), PlainSemiFL(torch.float64, epochs=1)
    fit(algorithm, 2, "64-true")
    for round_index in (1, 2):
        plain.round(round_index)
    ours = {name.removeprefix("network."): t for name, t in algorithm.server.model().items()}
    theirs = plain.server.state_dict()
    return max(float((t - ours[name]).abs().max()) for name, t in theirs.items() if name in ours and t.dim())


def main() -> None:
    """Run rounds until the benchmark ends the process, or check that both implementations agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["ours", "authors-setting", "plain"], default="ours")
    parser.add_argument("--check", action="store_true", help="print the largest difference, and end")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if arguments.check:
        print(difference())
    elif arguments.variant == "ours":
        fit(semifl(EPOCHS), 10**6, "32-true", Pause())
    elif arguments.variant == "authors-setting":
        fit_in_the_authors_setting(Pause())
    else:
        plain, pacer = PlainSemiFL(torch.float32, EPOCHS), Pause().pacer
        for round_index in range(1, 10**6):
            pacer.pause()
            plain.round(round_index)


if __name__ == "__main__":
    main()
