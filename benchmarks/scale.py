"""100,000 clients: CPU time and memory over 200 rounds, and CPU time to set them up, by partition.

FedAvg trains a small perceptron on 30 images a client, ten clients a round. The first table has the rounds. The second
table has the setup of the data module with 3 and with 30 images a client; the images exist already.

    python benchmarks/scale.py
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data import Dirichlet, FederatedDataModule, Iid, NaturalClients, Partition, Shards, Stratified
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.models import MLP
from lightning_fedssl.run import TrainerView
from lightning_fedssl.trainer import FederatedTrainer

SPEC = DatasetSpec("digits", 10, (1, 8, 8), (0.5,), (0.25,), tuple("0123456789"))


PARTITIONS: dict[str, Callable[[], Partition]] = {
    "Iid": Iid,
    "NaturalClients": NaturalClients,
    "Stratified": Stratified,
    "Shards": Shards,
    "Dirichlet": functools.partial(Dirichlet, min_size=1),
}


class Data(FederatedDataModule):
    """The same number of random images for each client."""

    def __init__(self, clients: int, images: int = 30, partition: Partition | None = None) -> None:
        super().__init__(
            "digits", num_clients=clients, num_labels="all", label_location="clients", validation=0, weak="none",
            strong="none", partition=partition,
        )  # fmt: skip
        self.spec = SPEC
        labels = torch.arange(images * clients) % 10
        pixels = torch.randint(0, 256, (len(labels), 1, 8, 8), dtype=torch.uint8)
        self.pictures = ImageSplit(pixels, labels, client_ids=torch.arange(len(labels)) % clients)

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        return SPEC, self.pictures, ImageSplit(self.pictures.images[:10], self.pictures.labels[:10])


def resident_mib() -> float:
    """Memory of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Record(FederatedCallback):
    """Stores CPU time and memory at the start of each round."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Store a row."""
        self.rows.append((time.process_time(), resident_mib()))


def measure_setup(clients: int, images: int, turns: int = 3) -> str:
    """A row: the median CPU seconds of the data module's setup, for each partition."""
    cells = []
    for partition in PARTITIONS.values():
        seconds = []
        for _ in range(turns):
            data = Data(clients, images, partition())
            started = time.process_time()
            data.setup()
            seconds.append(time.process_time() - started)
        cells.append(f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})")
    return f"| {clients:,} | {images} | " + " | ".join(cells) + " |"


def main() -> None:
    """Set up, train, and print the tables."""
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
        begun, memory = record.rows[0]
        print(f"| {clients:,} | before the first | {1000 * (begun - started):.0f} | {memory:.0f} |")
        quarter = max(1, (len(record.rows) - 1) // 4)
        for first in range(0, len(record.rows) - quarter, quarter):
            part = record.rows[first : first + quarter + 1]
            times = [b[0] - a[0] for a, b in pairwise(part)]
            print(f"| {clients:,} | {first + 1}-{first + quarter} | {1000 * median(times):.1f} | {part[-1][1]:.0f} |")
    print("\n| clients | images each | " + " | ".join(PARTITIONS) + " |\n|---|---|" + "---|" * len(PARTITIONS))
    for images in (3, 30):
        print(measure_setup(max(arguments.clients), images), flush=True)


if __name__ == "__main__":
    main()
