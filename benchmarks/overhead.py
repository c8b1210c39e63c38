"""Measures the overhead of the framework per client, in rounds without training steps.

A round of 100 clients uses the real trainer, data, local trainer, callbacks, loggers and checkpoint. Every client
receives the model, restores and saves its optimizer state, iterates over its batches, and returns an update that is
checked and aggregated. ``training_step`` returns None, so that the local trainer skips the batch. The result is the
time from the start of a round to the start of the next one, divided by the number of clients.

    python benchmarks/overhead.py --rounds 9
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import command_line
import torch
from command_line import RESULTS
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN, NetworkFactory, WideResNet
from lightning_fedssl.state import Batch
from lightning_fedssl.trainer import FederatedTrainer

CLIENTS = 100
STEPS = 10
LIMIT_MS = 5.0
"""The largest accepted overhead of a client with a small network, in milliseconds."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        network: The network whose weights are sent and aggregated.
        real_batches: Whether clients compute views of their images; if not, every step uses the same prepared batch.
        checkpoint: Whether a checkpoint is written after every round.
    """

    network: NetworkFactory
    real_batches: bool = False
    checkpoint: bool = True


_SMALL: NetworkFactory = functools.partial(CNN, width=4)

CASES = {
    "CNN of width 4 (1,702 parameters)": Case(_SMALL),
    "the same, batches of weak views made": Case(_SMALL, real_batches=True),
    "WRN-28-2 (1.47 M parameters), no checkpoint": Case(WideResNet, checkpoint=False),
    "the same, with checkpoints (all clients' momenta: 0.6 GB)": Case(WideResNet),
}
"""The rows of the table; the first one is compared with the limit."""


class NoSteps(FedAvg):
    """Federated averaging whose clients iterate over their batches and do not train.

    Args:
        case: The row of the table.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(self, case: Case, **kwargs: Any) -> None:
        super().__init__(network=case.network, client_epochs=STEPS / 2, keep_client_optimizer=True, **kwargs)
        self.case = case
        self.configure_model()
        # Every client has a stored momentum, as if it had trained before.
        momenta = {f"{i}.momentum_buffer": torch.zeros_like(p) for i, p in enumerate(self.parameters())}
        for client in range(CLIENTS):
            self.clients.put(client, "optimizer", momenta)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Ten steps."""
        work = super().on_client_start(data)
        if self.case.real_batches:
            return work
        batch: Batch = {"x": torch.zeros(data.batch_size, *data.images.shape[1:]), "y": data.labels[: data.batch_size]}
        return LocalWork(work.num_samples, STEPS, lambda step: batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Nothing."""
        return None


class RoundStarts(FederatedCallback):
    """Stores the start times of rounds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_round_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Store the time."""
        self.seconds.append(time.perf_counter())


def milliseconds_per_client(case: Case, rounds: int) -> list[float]:
    """The overhead per client in each measured round, in milliseconds; the first round is a warm-up.

    Args:
        case: The row of the table.
        rounds: Number of measured rounds.
    """
    data = FederatedDataModule("digits", num_clients=CLIENTS, num_labels="all", label_location="clients", validation=0)
    starts = RoundStarts()
    checkpoint = FederatedCheckpoint(every_n_rounds=1 if case.checkpoint else rounds + 2)
    algorithm = NoSteps(case, num_classes=data.num_classes, in_shape=data.in_shape)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=rounds + 2, clients_per_round=CLIENTS, accelerator="cpu", callbacks=[starts, checkpoint],
            enable_progress_bar=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(algorithm, data)
    return [1000 * (end - start) / CLIENTS for start, end in pairwise(starts.seconds[1:])]


def main() -> None:
    """Measure, write the table, and fail if the overhead is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds measured per row")
    arguments = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    costs = {name: milliseconds_per_client(case, arguments.rounds) for name, case in CASES.items()}
    command_line.write(RESULTS / "overhead.md", _report(costs, arguments.rounds))
    if statistics.median(next(iter(costs.values()))) >= LIMIT_MS:
        raise SystemExit(f"the overhead of a client is more than {LIMIT_MS} ms")


def _report(costs: dict[str, list[float]], rounds: int) -> list[str]:
    return [
        "# Overhead per client",
        "",
        f"A round of {CLIENTS} clients with {STEPS} empty steps each: the model is sent, the optimizer state restored",
        "back and kept, batches gone through, update checked, summed and counted, scalars logged, checkpoint written",
        "unless the row says otherwise. The first row is the framework's own cost, which is to stay below",
        f"{LIMIT_MS:.0f} ms; the others add views of real images, and copies of a large model. Milliseconds per client",
        f"over {rounds} rounds.",
        "",
        "| case | median | fastest | slowest |",
        "|---|---|---|---|",
        *(f"| {n} | {statistics.median(c):.2f} | {min(c):.2f} | {max(c):.2f} |" for n, c in costs.items()),
        "",
        f"`{command_line.command(rounds=rounds)}` on {command_line.machine()}.",
    ]


if __name__ == "__main__":
    main()
