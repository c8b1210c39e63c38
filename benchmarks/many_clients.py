"""200 rounds with 100,000 clients: CPU time and memory over the rounds.

FedAvg trains a small perceptron on 30 images a client, ten clients a round. It prints a table of the rounds.

    python benchmarks/many_clients.py
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.models import MLP
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer_interface import TrainerInterface

SPEC = DatasetSpec("digits", 10, (1, 8, 8), (0.5,), (0.25,), tuple("0123456789"))


class Data(FederatedDataModule):
    """Thirty random images a client."""

    def __init__(self, clients: int) -> None:
        super().__init__(
            "digits", num_clients=clients, num_labels="all", label_location="clients", validation=0, weak="none",
            strong="none",
        )  # fmt: skip
        self.spec = SPEC

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        labels = torch.arange(30 * self.num_clients) % 10
        images = torch.randint(0, 256, (len(labels), 1, 8, 8), generator=torch.Generator().manual_seed(0))
        split = ImageSplit(images.to(torch.uint8), labels)
        return SPEC, split, ImageSplit(split.images[:10], labels[:10])


def resident_mib() -> float:
    """Memory of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Record(FederatedCallback):
    """Stores CPU time and memory at the start of each round."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []

    def on_round_start(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Store a row."""
        self.rows.append((time.process_time(), resident_mib()))


def main() -> None:
    """Train, and print a row for each part of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=201)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| clients | rounds | CPU ms a round (median) | MiB at the end |\n|---|---|---|---|")
    for clients in arguments.clients:
        record, started = Record(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            FederatedTrainer(
                max_rounds=arguments.rounds, clients_per_round=10, accelerator="cpu", devices=1,
                enable_progress_bar=False, logger=False, default_root_dir=folder,
                callbacks=[record, FederatedCheckpoint(every_n_rounds=arguments.rounds)],
            ).fit(FedAvg(network=functools.partial(MLP, hidden=(32,))), Data(clients))  # fmt: skip
        print(
            f"| {clients:,} | before the first | {1000 * (record.rows[0][0] - started):.0f} | {record.rows[0][1]:.0f} |"
        )
        quarter = max(1, (len(record.rows) - 1) // 4)
        for first in range(0, len(record.rows) - quarter, quarter):
            part = record.rows[first : first + quarter + 1]
            times = [b[0] - a[0] for a, b in pairwise(part)]
            print(f"| {clients:,} | {first + 1}-{first + quarter} | {1000 * median(times):.1f} | {part[-1][1]:.0f} |")


if __name__ == "__main__":
    main()
