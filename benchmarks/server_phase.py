"""A SemiFL round on two ranks, the server's steps repeated by each rank and shared (``trainer.share_server_steps``).

SemiFL with a ResNet-9 of width 16 on CIFAR-10: 4,000 labels, one epoch of the server in batches of 250 (16 steps). Ten
of 100 clients train ``--images`` images each for one epoch in batches of 10; all images pass the threshold of 0. Ways
take turns; a row gives wall-clock and CPU seconds of the server's phase and of the whole round without its evaluation,
means over the ranks.

    python benchmarks/server_phase.py --root /path/to/the/data
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.models import ResNet9
from lightning_fedssl.trainer import FederatedTrainer

KEYS = ["server/wall_s", "server/cpu_s", "round/wall_s", "round/cpu_s"]


class Watch(FederatedCallback):
    """Logs the seconds of the server's phase and of the round on this rank."""

    def on_round_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Start."""
        trainer.fabric.barrier()
        self.round_started = time.perf_counter(), time.process_time()

    def on_server_phase_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Start."""
        trainer.fabric.barrier()
        self.started = time.perf_counter(), time.process_time()

    def on_server_phase_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Log."""
        trainer.log("server/wall_s", time.perf_counter() - self.started[0])
        trainer.log("server/cpu_s", time.process_time() - self.started[1])

    def on_global_model(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Log; before the first round there is nothing to log."""
        if trainer.round_index:
            trainer.log("round/wall_s", time.perf_counter() - self.round_started[0])
            trainer.log("round/cpu_s", time.process_time() - self.round_started[1])


def measure(root: str, labels: int, images: int, **settings: Any) -> list[float]:
    """Seconds of one round, in the order of ``KEYS``, means over the ranks."""
    sgd = functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True)
    network = functools.partial(ResNet9, width=16, norm="static_batch")
    algorithm = SemiFL(network=network, optimizer=sgd, client_epochs=1, server_epochs=1, threshold=0)
    data = FederatedDataModule(
        "cifar10", root=root, num_clients=100, num_labels=labels, server_batch_size=250, validation=0,
        max_train_images=labels + 100 * images, max_test_images=10,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=1, clients_per_round=10, accelerator="cpu", logger=False, enable_progress_bar=False,
            callbacks=[Watch(), FederatedCheckpoint(every_n_rounds=9)], default_root_dir=folder, **settings,
        )  # fmt: skip
        trainer.fit(algorithm, data)
    return [float(trainer.callback_metrics[key]) for key in KEYS]


def main() -> None:
    """Measure in turns, and print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--labels", type=int, default=4000)
    parser.add_argument("--images", type=int, default=460, help="images of a client")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}
    ways = {
        "one rank": {},
        "two ranks, each repeats it": two,
        "two ranks share it": two | {"share_server_steps": True},
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(arguments.turns):
        for name, settings in ways.items():
            found[name].append(measure(arguments.root, arguments.labels, arguments.images, **settings))
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print(
        "| | server: wall s | server: CPU s of a rank | round: wall s | round: CPU s of a rank |\n|---|---|---|---|---|"
    )
    for name, clocks in found.items():
        medians = [f"{median(column):.2f}" for column in zip(*clocks, strict=True)]
        print(f"| {name} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()
