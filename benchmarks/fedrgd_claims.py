"""Tests FedRGD's two claims on real data with a small network, on a CPU.

1. ``norm``: group norm lowers gradient diversity and raises accuracy against batch norm (FedAvg, K = C = 10).
2. ``grouping``: grouping-based averaging beats FedAvg when many users take part (group norm, K = C = 30), with groups
   that are fixed sets of cohort slots, as in the authors' code. Three controls have the server's share of S = 3 groups:
   ``votes``, FedAvg whose server counts as S users; ``regroup``, groups that are drawn anew in every round, as in the
   paper; ``labels``, users who do not train.
3. ``half``: do users help where the server's share of the average is one half and the server trains alone at first?

    OMP_NUM_THREADS=1 python benchmarks/fedrgd_claims.py --root data

When a run has ended, one row is appended to ``results/fedrgd_claims.csv`` and its curve to
``results/fedrgd_claims_curves.csv``. A run that is in the first file is not repeated. At its end the script prints the
tables in Markdown and draws the plot.
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

from lightning_fedssl import ClassSkew, FederatedDataModule, FederatedTrainer, FedRGD, FractionalCosine
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import GradientDiversity
from lightning_fedssl.models import Network, ResNet9

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = {
    "mask_rate": "client/mask_rate",
    "update": "diversity/update_l2_squared",
    "update_with_server": "diversity/update_l2_squared_with_server",
    "gradient": "diversity/gradient_l2_squared",
    "gradient_with_server": "diversity/gradient_l2_squared_with_server",
}
"""Columns and the scalars whose means over the second half of a run they hold: diversities by Eq. 12 and Eq. 1."""

WATCHED = {
    "group_accuracy_min": "group/accuracy_min",
    "largest_class_share": "group/largest_class_share",
    "confident_accuracy": "pseudo_label/confident_accuracy",
}
"""Further columns of the curves: the quality of the group means behind the evaluated average, and of the labels."""

_HALF: dict[str, Any] = {"norm": "group", "server_only_rounds": 100}
_ONE_PLACE = {"groups": 1, "server_votes": 1_000_000, "users": 0}
"""An average that is the server's model."""

CLAIMS: dict[str, dict[str, Any]] = {
    "norm": {
        "settings": {"dataset": "mnist", "clients": 10, "rounds": 360, "local_steps": 2, "lr": 0.02},
        "variants": {
            "batch norm": {"norm": "batch", "groups": 1},
            "group norm": {"norm": "group", "groups": 1},
        },
    },
    "norm, ResNet": {
        "settings": {"dataset": "cifar10", "clients": 10, "rounds": 60, "local_steps": 8, "lr": 0.01},
        "data": {"num_labels": 5000, "label_location": "clients", "server_batch_size": 16},
        "variants": {
            "batch norm": {"norm": "batch", "groups": 1},
            "group norm": {"norm": "group", "groups": 1},
        },
    },
    "grouping": {
        "settings": {"dataset": "mnist", "clients": 30, "rounds": 160, "local_steps": 2, "lr": 0.06},
        "variants": {
            "FedAvg": {"norm": "group", "groups": 1},
            "grouping, S = 3": {"norm": "group", "groups": 3, "regroup": "slots"},
        },
    },
    "votes": {
        "settings": {"dataset": "mnist", "clients": 30, "rounds": 160, "local_steps": 2, "lr": 0.06},
        "variants": {"FedAvg, server counts 3": {"norm": "group", "groups": 1, "server_votes": 3}},
    },
    "regroup": {
        "settings": {"dataset": "mnist", "clients": 30, "rounds": 160, "local_steps": 2, "lr": 0.06},
        "variants": {"regrouping each round, S = 3": {"norm": "group", "groups": 3}},
    },
    "labels": {
        "settings": {"dataset": "mnist", "clients": 30, "rounds": 160, "local_steps": 2, "lr": 0.06},
        "variants": {"labels alone, server counts 3": {"norm": "group", "groups": 1, "server_votes": 3, "users": 0}},
    },
    **{
        f"half, {labels:,} labels": {
            "settings": {"dataset": "mnist", "clients": 30, "rounds": 320, "local_steps": 2, "lr": 0.06},
            "data": {"num_labels": labels},
            "variants": {
                "regrouping each round, S = 3": {**_HALF, "groups": 3, "server_votes": 10},
                "FedAvg": {**_HALF, "groups": 1, "server_votes": 30},
                "labels alone": {**_HALF, "groups": 1, "server_votes": 30, "users": 0},
                "labels in one place": {**_HALF, **_ONE_PLACE},
                "labels in one place, 10 steps a round": {**_HALF, **_ONE_PLACE, "local_steps": 10},
            },
        }
        for labels in (100, 200, 1000)
    },
}
"""All claims have skew R = 0.4, threshold 0.95, a 7/16 cosine, and 1,000 labels at the server unless ``data`` differs.

On CIFAR-10 the labels are at the users, because with 1,000 at the server no image gets a confident label in so few
rounds.
"""

KEY = ("claim", "dataset", "clients", "rounds", "local_steps", "lr", "variant", "seed")
COLUMNS = (*KEY, "accuracy", "measured_skew", *MEASURED, "cpu_s")
CURVES = (*KEY, "round", "accuracy", *MEASURED, *WATCHED)


class SmallNet(Network):
    """Three 3x3 convolutions of 8, 16, 32 channels and stride 2, each with norm and ReLU; then linear.

    Group norm has 4 groups: with 32, as in the paper, every group would be a single channel.
    """

    def __init__(
        self, num_classes: int = 10, in_shape: tuple[int, int, int] = (1, 28, 28), norm: str = "group"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out in ((in_shape[0], 8), (8, 16), (16, 32)):
            layer = nn.GroupNorm(4, out) if norm == "group" else nn.BatchNorm2d(out)
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), layer, nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(32 * (-(-in_shape[1] // 8)) * (-(-in_shape[2] // 8)), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def small_resnet(num_classes: int = 10, in_shape: tuple[int, int, int] = (3, 32, 32), norm: str = "group") -> Network:
    """ResNet-9 at a sixteenth of its widths: 4 to 32 channels, 26,490 weights.

    Group norm has 2 groups, so that a group has 2 to 16 channels, as 32 groups have at the published widths.
    """
    network = ResNet9(num_classes, in_shape, norm="batch", width=4)
    if norm == "group":
        for block in network.modules():
            for name, layer in block.named_children():
                if isinstance(layer, nn.BatchNorm2d):
                    setattr(block, name, nn.GroupNorm(2, layer.num_features))
    return network


NETWORKS = {"cifar10": small_resnet}
"""Networks of data sets that do not use :class:`SmallNet`."""


class Course(FederatedCallback):
    """The scalars of every measured round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Store the round's scalars."""
        names = {**MEASURED, **WATCHED, "accuracy": "val/accuracy"}
        found = {column: metrics[name] for column, name in names.items() if name in metrics}
        self.rounds.append({"round": trainer.round_index, **found})

    def mean(self, column: str) -> float:
        """The mean of a scalar over the second half of the run."""
        late = [row[column] for row in self.rounds[len(self.rounds) // 2 - 1 :] if column in row]
        return sum(late) / max(len(late), 1)


def main() -> None:
    """Run the missing runs, seed by seed, then print the tables and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", nargs="*", choices=CLAIMS, default=[*CLAIMS], help="which of them")
    parser.add_argument("--root", default="data", help="the data folder, with MNIST in it")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ..")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the CSV files and the plot")
    parser.add_argument("--at-most", type=int, default=1000, help="end after this number of runs")
    others = {"dataset": str, "rounds": int, "local_steps": int, "lr": float}
    for name, kind in others.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="another value than the claim's")
    options = parser.parse_args()
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    changed = {name: value for name in others if (value := getattr(options, name)) is not None}
    results, curves = options.results / "fedrgd_claims.csv", options.results / "fedrgd_claims_curves.csv"
    for key in list(missing(options, changed, read(results)))[: options.at_most]:
        settings = CLAIMS[key["claim"]]["settings"] | changed
        variant, data = CLAIMS[key["claim"]]["variants"][key["variant"]], CLAIMS[key["claim"]].get("data", {})
        found, course = run({"root": options.root, **data}, key["seed"], **(settings | variant))
        append(curves, CURVES, [key | row for row in course.rounds if "accuracy" in row])
        append(results, COLUMNS, [key | found])
    for claim in options.claims:
        print("\n".join(table(read(results), claim)), "\n")
    plot(read(curves), options.results / "fedrgd_claims.png")


def missing(
    options: argparse.Namespace, changed: dict[str, Any], rows: list[dict[str, str]]
) -> Iterator[dict[str, Any]]:
    """The runs that the CSV file does not have, seed by seed."""
    known = {tuple(row[name] for name in KEY) for row in rows}
    for seed, claim in product(range(options.seeds), options.claims):
        for variant in CLAIMS[claim]["variants"]:
            key = {"claim": claim, **CLAIMS[claim]["settings"], **changed, "variant": variant, "seed": seed}
            if tuple(str(key[name]) for name in KEY) not in known:
                yield key


def run(
    data_options: dict[str, Any],
    seed: int,
    *,
    dataset: str,
    clients: int,
    rounds: int,
    local_steps: int,
    lr: float,
    norm: str,
    groups: int,
    regroup: Literal["each_round", "slots"] = "each_round",
    server_votes: int = 1,
    server_only_rounds: int = 0,
    users: float = 1,
) -> tuple[dict[str, float], Course]:
    """One run: its final accuracy and its curve."""
    lightning.seed_everything(seed, verbose=False)
    common = {"num_labels": 1000, "server_batch_size": 64, "client_batch_size": 16, "validation": "test"}
    data = FederatedDataModule(
        dataset, num_clients=clients, partition=ClassSkew(0.4), **{**common, **data_options}
    )  # fmt: skip
    algorithm = FedRGD(
        network=partial(NETWORKS.get(dataset, SmallNet), norm=norm),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
        schedule=FractionalCosine(),
        groups=groups,
        regroup=regroup,
        server_votes=server_votes,
        server_only_rounds=server_only_rounds,
        consistency_weight=users,
        local_steps=local_steps,
        bn_buffers="average" if data.label_location == "clients" else "slot",  # no server, no buffers of its own
    )
    course, started = Course(), time.process_time()
    measures = [GradientDiversity("update", 2)]
    if clients == 10:  # a pass over all images takes ten processor seconds
        measures.append(GradientDiversity("gradient", rounds))
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=rounds, clients_per_round=clients, accelerator="cpu", logger=False, default_root_dir=folder,
            enable_progress_bar=False, check_val_every_n_rounds=max(1, rounds // 8), callbacks=[*measures, course],
        )  # fmt: skip
        trainer.fit(algorithm, data)
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise SystemExit("stopped: the unfinished run is not saved")
    found = {
        "accuracy": float(trainer.callback_metrics["test/accuracy"]),
        "measured_skew": data.statistics.class_skew,
        "cpu_s": time.process_time() - started,
    }
    return found | {column: course.mean(column) for column in MEASURED}, course


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, which gets a header if it is new."""
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    print(rows[-1], flush=True)


def table(rows: list[dict[str, str]], claim: str) -> list[str]:
    """Mean and population standard deviation of a claim's variants, and every seed."""
    columns = ("variant", "accuracy", "seed by seed", "mask rate", "diversity of updates", "of gradients")
    lines = [f"| K = C, rounds, T, rate | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    setting = ("dataset", "clients", "rounds", "local_steps", "lr", "variant")
    chosen = [row for row in rows if row["claim"] == claim]
    for values in dict.fromkeys(tuple(row[name] for name in setting) for row in chosen):
        found = [row for row in chosen if tuple(row[name] for name in setting) == values]
        lines.append(f"| {', '.join(values[:-1])} | {values[-1]} | {' | '.join(cells(found))} |")
    return lines


def cells(runs: list[dict[str, str]]) -> list[str]:
    """The cells of a table row for runs that differ only in their seeds."""
    values = {name: [float(r[name]) for r in runs] for name in ("accuracy", *MEASURED)}
    accuracy = [100 * value for value in values["accuracy"]]
    spread = f"{statistics.mean(accuracy):.1f} ± {statistics.pstdev(accuracy):.1f}"
    labelled = ", ".join(f"{100 * value:.0f}" for value in values["mask_rate"])
    pairs = [
        "; ".join(f"{users:.2f}, {everyone:.2f}" for users, everyone in zip(values[a], values[b], strict=True))
        for a, b in (("update", "update_with_server"), ("gradient", "gradient_with_server"))
    ]
    return [spread, ", ".join(f"{value:.1f}" for value in accuracy), f"{labelled} %", *pairs]


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Draw accuracy, mask rate and diversity of updates over the rounds, one line per variant and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = {"accuracy": "test accuracy", "mask_rate": "mask rate", "update": "users' diversity"}
    settings = list(dict.fromkeys(tuple(row[name] for name in KEY[1:6]) for row in rows))
    figure, grid = plt.subplots(len(settings), len(shown), figsize=(13, 3.4 * len(settings)), squeeze=False)
    for line, setting in zip(grid, settings, strict=True):
        chosen = [row for row in rows if tuple(row[name] for name in KEY[1:6]) == setting]
        dataset, clients, _, steps, lr = setting
        for axes, (column, title) in zip(line, shown.items(), strict=True):
            for number, variant in enumerate(dict.fromkeys(row["variant"] for row in chosen)):
                for seed in sorted({row["seed"] for row in chosen}):
                    of_run = [r for r in chosen if r["variant"] == variant and r["seed"] == seed and r[column]]
                    x, y = [int(r["round"]) for r in of_run], [float(r[column]) for r in of_run]
                    label = variant if seed == "0" else None
                    axes.plot(x, y, f"C{number}.-", label=label, linewidth=1.2, markersize=4)
            axes.set(xlabel="round", title=f"{dataset}, K = C = {clients}, T = {steps}, rate {lr}: {title}")
            axes.title.set_size(9)
            axes.set_yscale("log" if column == "update" else "linear")
        line[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
