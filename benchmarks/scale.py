"""What grows with clients, cohort, weights, images and rounds: CPU time and memory.

FedAvg trains a perceptron on random images of 8 x 8; the last row is FedSHVR, whose clients keep a state. Every run has
a process of its own, forked from one that has imported all: *peak* is its largest memory, *save* the CPU time of a
checkpoint in a round. One thread.

    OMP_NUM_THREADS=1 python benchmarks/scale.py
    OMP_NUM_THREADS=1 python benchmarks/scale.py "100,000 clients"
"""

from __future__ import annotations

import functools
import multiprocessing
import resource
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

import torch

import command_line
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, FedSHVR
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.models import MLP
from lightning_fedssl.run import TrainerView
from lightning_fedssl.trainer import FederatedTrainer

_WEIGHTS = {"clients": 20, "cohort": 5, "images": 10, "rounds": 6, "hidden": (128,)}
CASES: dict[str, dict[str, Any]] = {
    **{f"{n:,} clients": {"clients": n} for n in (10, 1000, 100_000)},
    **{f"{n:,} of 10,000 clients a round": {"clients": 10_000, "cohort": n, "rounds": 6} for n in (10, 100, 1000)},
    "9,600 weights": _WEIGHTS,
    "1.1 million weights": _WEIGHTS | {"hidden": (1000, 1000)},
    "9.2 million weights": _WEIGHTS | {"hidden": (3000, 3000)},
    "100 million weights": _WEIGHTS | {"hidden": (10_000, 10_000)},
    **{f"{n:,} images a client": {"clients": 20, "cohort": 2, "images": n, "rounds": 3} for n in (500, 50_000)},
    "3,000 rounds": {"clients": 20, "cohort": 2, "images": 10, "rounds": 3000},
    "200 clients with a state": {"clients": 2000, "cohort": 200, "rounds": 8, "method": FedSHVR},
}
"""The settings of each row; by default 10 of 100 clients with 30 images each train in each of 12 rounds."""


class Data(FederatedDataModule):
    """The same number of random images for each client."""

    def __init__(self, clients: int, images: int) -> None:
        super().__init__(
            "digits", num_clients=clients, num_labels="all", label_location="clients", validation=0, weak="none",
            strong="none",
        )  # fmt: skip
        pixels = torch.randint(0, 256, (images * clients, 1, 8, 8), dtype=torch.uint8)
        self.pictures = ImageSplit(pixels, torch.arange(len(pixels)) % 10)

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        return self.spec, self.pictures, ImageSplit(self.pictures.images[:10], self.pictures.labels[:10])


class Record(FederatedCheckpoint):
    """Notes the CPU time at the start of each round, and that of each checkpoint."""

    starts: ClassVar[list[float]] = []
    saves: ClassVar[list[float]] = []

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Note the time."""
        self.starts.append(time.process_time())

    def on_round_end(self, *of_round: Any) -> None:
        """Save, and note how long it took."""
        started = time.process_time()
        super().on_round_end(*of_round)
        self.saves.append(time.process_time() - started)


def measure(
    name: str, clients: int = 100, cohort: int = 10, images: int = 30, rounds: int = 12, hidden: Any = (32,),
    method: type[FederatedAlgorithm] = FedAvg,
) -> None:  # fmt: skip
    """Print the row of a run."""
    started, record = time.process_time(), Record()
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            max_rounds=rounds, clients_per_round=cohort, accelerator="cpu", devices=1, enable_progress_bar=False,
            logger=False, default_root_dir=folder, clients_at_once=1, callbacks=[record],
        ).fit(method(network=functools.partial(MLP, hidden=hidden)), Data(clients, images))  # fmt: skip
    times = [1000 * (b - a) for a, b in pairwise(record.starts)]
    quarter = max(1, len(times) // 4)
    first, last, save = median(times[:quarter]), median(times[-quarter:]), 1000 * median(record.saves)
    setup, peak = record.starts[0] - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"| {name} | {setup:.2f} | {first:,.1f} | {last:,.1f} | {save:,.1f} | {peak:,.0f} |", flush=True)


def main() -> None:
    """Print the table."""
    print(f"`OMP_NUM_THREADS=1 python benchmarks/scale.py` on {command_line.machine()}.\n")
    head = "| | set-up, s | a round, first quarter, ms | last quarter, ms | save, ms | peak, MiB |"
    print(f"{head}\n|---|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or CASES:
        with multiprocessing.get_context("fork").Pool(1) as process:
            process.apply(measure, (name,), CASES[name])


if __name__ == "__main__":
    main()
