"""FedRGD's two claims on small real data with a small network, on a CPU.

1. Group norm lowers gradient diversity and raises accuracy against batch norm (FedAvg, K = C = 10).
2. Grouping-based averaging beats FedAvg when many users take part (group norm, K = C = 30).

``python benchmarks/fedrgd_claims.py --claim norm --dataset fashion_mnist --root DATA``, or ``--claim grouping --dataset
digits``; one row per run is appended to the CSV file as soon as the run has ended.
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from lightning_fedssl import ClassSkew, FederatedDataModule, FederatedTrainer, FedRGD, FractionalCosine
from lightning_fedssl.callbacks import GradientDiversity
from lightning_fedssl.hooks import FederatedCallback
from lightning_fedssl.models import Network

RESULTS = Path(__file__).resolve().parent / "results" / "fedrgd_claims.csv"
DIVERSITY = ("diversity/update_l2_squared", "diversity/update_l2_squared_with_server", "diversity/update_of_means")
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "norm": {
        "batch norm, FedAvg": {"norm": "batch", "clients": 10, "groups": 1},
        "group norm, FedAvg": {"norm": "group", "clients": 10, "groups": 1},
    },
    "grouping": {
        "FedAvg": {"norm": "group", "clients": 30, "groups": 1},
        "grouping, S = 3": {"norm": "group", "clients": 30, "groups": 3},
    },
}


class SmallNet(Network):
    """Three 3x3 convolutions of 8, 16, 32 channels and stride 2, with norm and ReLU; average pooling; linear.

    On images of 8 x 8 pixels the first convolution has stride 1.

    Group norm has 4 groups: with 32, as in the paper, so few channels would have a group each.
    """

    def __init__(
        self, num_classes: int = 10, in_shape: tuple[int, int, int] = (1, 28, 28), norm: str = "group"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out in ((in_shape[0], 8), (8, 16), (16, 32)):
            stride = 1 if in_shape[1] <= 8 and out == 8 else 2
            layer = nn.GroupNorm(4, out) if norm == "group" else nn.BatchNorm2d(out)
            layers += [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), layer, nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


class MeanOf(FederatedCallback):
    """The means of scalars over the second half of a run."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.values: dict[str, list[float]] = {name: [] for name in names}

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Note the round's scalars."""
        for name, values in self.values.items():
            if trainer.round_index > trainer.max_rounds / 2 and name in metrics:
                values.append(metrics[name])

    def mean(self, name: str) -> float:
        """The mean of one scalar."""
        return sum(self.values[name]) / max(len(self.values[name]), 1)


DATA: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"num_labels": 1000, "server_batch_size": 64, "client_batch_size": 16},
    "digits": {"num_labels": 50, "server_batch_size": 25, "client_batch_size": 10},
}


def run(options: argparse.Namespace, seed: int, *, norm: str, clients: int, groups: int) -> dict[str, float]:
    """One run; what it came to."""
    lightning.seed_everything(seed, verbose=False)
    means = MeanOf((*DIVERSITY, "client/mask_rate"))
    data = FederatedDataModule(
        options.dataset, root=options.root, num_clients=clients, partition=ClassSkew(options.skew), validation=0,
        **DATA[options.dataset],
    )  # fmt: skip
    algorithm = FedRGD(
        network=partial(SmallNet, norm=norm),
        optimizer=partial(torch.optim.SGD, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
        schedule=FractionalCosine(),
        groups=groups,
        local_steps=options.local_steps,
        threshold=options.threshold,
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=options.rounds, clients_per_round=clients, accelerator="cpu", logger=False,
            default_root_dir=folder, enable_progress_bar=False, callbacks=[GradientDiversity(every_n_rounds=2), means],
        )  # fmt: skip
        trainer.fit(algorithm, data)
    return {
        "test_accuracy": float(trainer.callback_metrics["test/accuracy"]),
        "measured_skew": data.statistics.class_skew,
        **{name.rpartition("/")[2]: means.mean(name) for name in means.values},
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Run every variant with every seed, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claim", choices=VARIANTS, required=True)
    parser.add_argument("--dataset", choices=DATA, default="fashion_mnist")
    parser.add_argument("--root", default="data")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--local-steps", type=int, default=16)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--skew", type=float, default=0.4)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    for seed in range(options.seeds):
        for name, settings in VARIANTS[options.claim].items():
            found = run(options, seed, **settings)
            row = {
                "dataset": options.dataset, "claim": options.claim, "variant": name, "seed": seed,
                "rounds": options.rounds, "local_steps": options.local_steps, "lr": options.lr,
                "threshold": options.threshold, **found,
            }  # fmt: skip
            append(options.output, row)
            print(row, flush=True)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a CSV file, which begins with the names."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
