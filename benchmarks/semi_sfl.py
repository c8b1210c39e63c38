"""Compares Semi-SFL with its baselines and ablations on small real data, on a CPU; IID and Dir(0.1).

``mnist``: the paper's CNN at a quarter of its widths, 100 labels. ``cifar10``: AlexNet at an eighth, 4,000 labels.
The methods are Semi-SFL with and without adaptation of K_s, with a larger constant K_s, without clustering
regularisation (T alone), without the supervised contrastive loss (C alone), without both, with queues of four joint
steps; FedSwitch-SL, also with labels by the teacher only; SemiFL and supervised training alone; all on the same
partitions and initial weights.

``python benchmarks/semi_sfl.py --root DATA``: one row per evaluated round is appended to the CSV file when a run has
ended, and runs that are in the file are not repeated. ``--report 0.9`` reads the file: the table, with rounds, traffic
and simulated minutes to an accuracy of 90 %, and the plot. ``--splits``: bytes by split index.

Longer runs have a CSV file of their own. In them K_s can start high and fall, as in the paper, against constants:

    python benchmarks/semi_sfl.py --root DATA --rounds 200 --csv benchmarks/results/semi_sfl_long.csv --methods \
      Semi-SFL FedSwitch-SL "Semi-SFL, no clustering" "Semi-SFL, K_s from 80" "Semi-SFL, K_s = 32"
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from lightning_fedssl import (
    SVHNCNN,
    ClientDirichlet,
    Cosine,
    Device,
    FederatedDataModule,
    FederatedTrainer,
    FedSwitchSL,
    Iid,
    SemiFL,
    SemiSFL,
    SystemModel,
)  # fmt: skip
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import GlobalUpdateFrequency
from lightning_fedssl.models import VGG16, AlexNet
from lightning_fedssl.models.split import split

RESULTS = Path(__file__).resolve().parent / "results" / "semi_sfl.csv"
COLUMNS = (
    "dataset", "partition", "method", "seed", "round", "accuracy", "upload_bytes", "download_bytes", "simulated_s",
    "server_steps", "confident", "impurity", "server_loss", "client_loss", "cpu_s",
)  # fmt: skip
PARTITIONS: dict[str, Any] = {"iid": Iid, "dir0.1": partial(ClientDirichlet, alpha=0.1)}
CLIENTS, ACTIVE, STEPS, BATCH, EVERY = 20, 5, 10, 32, 2


@dataclass(frozen=True)
class Setting:
    """The settings that differ between data sets."""

    network: Callable[..., nn.Module]
    split: int
    labels: int
    rounds: int
    lr: float
    server_steps: int


SETTINGS = {
    "mnist": Setting(partial(SVHNCNN, width=8, hidden=128), 2, 100, 40, 0.03, STEPS),
    "cifar10": Setting(partial(AlexNet, width=8), 5, 4000, 20, 0.05, 10 * STEPS),
}
MORE = 3.6
"""This multiple of K_s is about the mean of the adapted K_s on MNIST: a control with as many steps of the server."""
HIGH_START = 80
"""K_s in the first round where it is adapted as in the paper."""
LONG = {
    "Semi-SFL, K_s from 80": None,
    "Semi-SFL, K_s = 80": 80,
    "Semi-SFL, K_s = 50": 50,
    "Semi-SFL, K_s = 32": 32,
    "Semi-SFL, K_s = 5": 5,
}
"""Methods for long runs, which are run only if they are named, and their K_s; null: adapted from a high start."""

DEVICES = SystemModel([Device("fast", 0.05, 0.01), Device("slow", 0.15, 0.03)], server_step_s=0.01)
"""Examples of devices, and the paper's links: 10 to 20 Mbit/s towards a client, 2 to 8 away from it."""


def methods(setting: Setting) -> dict[str, tuple[type[FederatedAlgorithm], dict[str, Any]]]:
    """Every method and its options; an IID client's epoch has STEPS batches.

    SemiFL has the other options of its own paper, and its server makes K_s steps per round, like the other methods'.
    """
    steps, more = setting.server_steps, {"server_steps": round(MORE * setting.server_steps)}
    common: dict[str, Any] = {"split": setting.split, "threshold": 0.95, "server_steps": steps, "client_steps": STEPS}
    contrast, alone = common | {"queue_size": ACTIVE * BATCH}, common | {"client_steps": 0}
    server_epochs = steps * BATCH / setting.labels
    semifl = {"client_epochs": 1, "server_epochs": server_epochs, "server_phase": "before"}
    return {
        "supervised-only": (FedSwitchSL, alone),
        "SemiFL": (SemiFL, semifl),
        "FedSwitch-SL": (FedSwitchSL, common),
        "Semi-SFL": (SemiSFL, contrast),
        "Semi-SFL, no clustering": (SemiSFL, contrast | {"clustering": 0.0}),
        "Semi-SFL, no T": (SemiSFL, contrast | {"supervised_contrastive": 0.0}),
        "Semi-SFL, neither": (SemiSFL, contrast | {"clustering": 0.0, "supervised_contrastive": 0.0}),
        "Semi-SFL, four steps in the queue": (SemiSFL, contrast | {"queue_size": 4 * ACTIVE * BATCH}),
        "FedSwitch-SL, teacher only": (FedSwitchSL, common | {"beta": 0.0}),
        "Semi-SFL, adaptive K_s": (SemiSFL, contrast | {"server_steps": None}),
        "Semi-SFL, larger K_s": (SemiSFL, contrast | more),
        "supervised-only, larger K_s": (FedSwitchSL, alone | more),
        "SemiFL, larger K_s": (SemiFL, semifl | {"server_epochs": MORE * server_epochs}),
        "FedSwitch-SL, larger K_s": (FedSwitchSL, common | more),
        **{name: (SemiSFL, contrast | {"server_steps": value}) for name, value in LONG.items()},
    }


def adaptation(setting: Setting, start: int) -> GlobalUpdateFrequency:
    """The paper's schedule at this length: milestones at the same shares, windows of 10 rounds where they fit."""
    milestones = tuple(setting.rounds * share // 100 for share in (15, 25, 40, 60, 70))
    return GlobalUpdateFrequency(start, milestones, window=10 if milestones[0] >= 20 else 3)


class Curve(FederatedCallback):
    """Stores the CSV rows of the evaluated rounds, with the communication so far; K_s is constant unless adapted."""

    def __init__(self, server_steps: int) -> None:
        self.server_steps = server_steps
        self.rows: list[dict[str, Any]] = []
        self.traffic = {"upload_bytes": 0.0, "download_bytes": 0.0}

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Store a round."""
        for name in self.traffic:
            self.traffic[name] += metrics.get(f"communication/{name}", 0.0)
        if "val/accuracy" in metrics:
            self.rows.append(
                {
                    "round": trainer.round_index,
                    "accuracy": metrics["val/accuracy"],
                    "server_steps": metrics.get("server/steps", self.server_steps),
                    "confident": metrics.get("client/mask_rate"),
                    "impurity": metrics.get("pseudo_label/impurity"),
                    "server_loss": metrics.get("server/loss"),
                    "client_loss": metrics.get("client/loss"),
                    "simulated_s": metrics["system/seconds"],
                    **self.traffic,
                }
            )


def setting_of(options: argparse.Namespace) -> Setting:
    """The settings of the data set, with another number of rounds if one is given."""
    setting = SETTINGS[options.dataset]
    return setting if options.rounds is None else replace(setting, rounds=options.rounds)


def run(options: argparse.Namespace, partition: str, method: str, seed: int) -> list[dict[str, Any]]:
    """One run's curve."""
    lightning.seed_everything(seed, verbose=False)
    setting = setting_of(options)
    kind, settings = methods(setting)[method]
    curve = Curve(settings.get("server_steps") or round(settings.get("server_epochs", 0) * setting.labels / BATCH))
    data = FederatedDataModule(
        options.dataset, root=options.root, num_clients=CLIENTS, num_labels=setting.labels,
        partition=PARTITIONS[partition](), server_batch_size=BATCH, client_batch_size=BATCH, validation="test",
        max_train_images=setting.labels + CLIENTS * STEPS * BATCH, max_test_images=1000,
    )  # fmt: skip
    algorithm = kind(
        network=setting.network,
        optimizer=partial(torch.optim.SGD, lr=setting.lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=Cosine(final=0.25),
        **settings,
    )
    adapted = settings.get("server_steps", 0) is None
    start = HIGH_START if method in LONG else setting.server_steps * 80 // 50
    callbacks: list[Any] = [curve, *([adaptation(setting, start)] if adapted else [])]
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=setting.rounds, clients_per_round=ACTIVE, accelerator="cpu", logger=False, callbacks=callbacks,
            default_root_dir=folder, enable_progress_bar=False, check_val_every_n_rounds=EVERY, system=DEVICES,
        )  # fmt: skip
        trainer.fit(algorithm, data)
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise SystemExit("stopped: the unfinished run is not saved")
    who = {"dataset": options.dataset, "partition": partition, "method": method, "seed": seed}
    return [{**row, **who, "cpu_s": round(time.process_time() - started, 1)} for row in curve.rows]


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Every run, seed by seed; the clients' partition does not matter to supervised training alone."""
    names = options.methods or [name for name in methods(SETTINGS[options.dataset]) if name not in LONG]
    for seed, (partition, method) in product(options.seeds, product(options.partitions, names)):
        if not method.startswith("supervised-only") or partition == options.partitions[0]:
            yield partition, method, seed


def splits() -> None:
    """Fig. 11: what a client sends and receives in a round by split index, with K_u = 50 steps on batches of 64."""
    with torch.device("meta"):
        networks = ((SVHNCNN(), (3, 32, 32)), (AlexNet(), (3, 32, 32)), (VGG16(), (3, 144, 144)))
        for network, shape in networks:
            print(f"\n{type(network).__name__}, MiB\n| split | bottom | features | down | up |\n|---|---|---|---|---|")
            for at in range(1, sum(p.dim() > 1 for p in network.parameters())):
                bottom = split(network, at, shape).eval().bottom
                features = 64 * bottom(torch.zeros(1, *shape)).nbytes
                weights = sum(p.nbytes for p in bottom.parameters())
                row = (weights, features, 2 * weights + 50 * features, weights + 100 * features)
                print(f"| {at} | " + " | ".join(f"{size / 2**20:.2f}" for size in row) + " |")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the CSV file."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add a run's rows, with a header if the file is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def report(path: Path, dataset: str, target: float) -> None:
    """Print the table and draw the curves of what has been run so far with a data set."""
    import matplotlib.pyplot as plt

    curves: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    for row in (row for row in read(path) if row["dataset"] == dataset):
        curves.setdefault((row["partition"], row["method"]), {}).setdefault(row["seed"], []).append(row)
    header = ("partition", "method", "accuracy", "seed by seed", f"rounds to {target:.0%}", "MB", "minutes", "K_s")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    figure, axes = plt.subplots(1, len(PARTITIONS), figsize=(13, 5), sharey=True)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(method.split(",")[0] for _, method in curves))}
    for (partition, method), runs in curves.items():
        print(f"| {partition} | {method} | {' | '.join(cells(list(runs.values()), target))} |")
        rounds = [int(row["round"]) for row in next(iter(runs.values()))]
        heights = list(zip(*([float(row["accuracy"]) for row in rows] for rows in runs.values()), strict=True))
        name, _, variant = method.partition(", ")
        style = {"": "-", "larger K_s": "--", "adaptive K_s": "-."}.get(variant, ":")
        for at in PARTITIONS if name == "supervised-only" else [partition]:
            axis = axes[list(PARTITIONS).index(at)]
            axis.plot(rounds, [mean(values) for values in heights], style, label=method, color=colours[name])
            low, high = [min(values) for values in heights], [max(values) for values in heights]
            axis.fill_between(rounds, low, high, alpha=0.07, color=colours[name])
    tops = [float(row["accuracy"]) for runs in curves.values() for rows in runs.values() for row in rows]
    for axis, name in zip(axes, PARTITIONS, strict=True):
        axis.set(title=f"{dataset}, {SETTINGS[dataset].labels} labels, {name}", xlabel="round", ylabel="test accuracy")
        axis.set_ylim(max(min(tops), max(tops) - 0.35), max(tops) + 0.01)
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), title="mean and range over seeds")
    figure.tight_layout()
    figure.savefig(path.with_name(f"{path.stem}_{dataset}.png"), dpi=110)


def cells(runs: list[list[dict[str, str]]], target: float) -> list[str]:
    """The cells of a method: its last accuracy, and the mean costs until the target if all seeds reached it."""
    last = [100 * float(rows[-1]["accuracy"]) for rows in runs]
    reached = [next((row for row in rows if float(row["accuracy"]) >= target), None) for rows in runs]
    arrived = [row for row in reached if row is not None]
    costs = [f"by {len(arrived)} of {len(runs)}", "", ""]
    if arrived == reached:
        traffic = mean(float(row["upload_bytes"]) + float(row["download_bytes"]) for row in arrived) / 1e6
        minutes = mean(float(row["simulated_s"]) for row in arrived) / 60
        costs = [f"{mean(int(row['round']) for row in arrived):.0f}", f"{traffic:.0f}", f"{minutes:.1f}"]
    steps = mean(float(row["server_steps"]) for rows in runs for row in rows)
    spread = f"{mean(last):.1f} ± {pstdev(last):.1f}"
    return [spread, ", ".join(f"{value:.1f}" for value in last), *costs, f"{steps:.0f}"]


def main() -> None:
    """Run what is missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="the data folder")
    parser.add_argument("--dataset", choices=SETTINGS, default="mnist")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", help="unless given, all but those for long runs")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=[*PARTITIONS])
    parser.add_argument("--rounds", type=int, help="another length than the data set's usual one; give a --csv, too")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--splits", action="store_true", help="print the split sweep instead")
    parser.add_argument("--report", type=float, metavar="TARGET", help="table and plot instead, for an accuracy")
    parser.add_argument("--limit", type=int, default=1000, help="runs at most")
    options = parser.parse_args()
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.splits:
        return splits()
    if options.report is not None:
        return report(options.csv, options.dataset, options.report)
    known = [row for row in read(options.csv) if row["dataset"] == options.dataset]
    done = {(row["partition"], row["method"], int(row["seed"])) for row in known}
    missing = [one for one in wanted(options) if one not in done]
    for partition, method, seed in missing[: options.limit]:
        rows = run(options, partition, method, seed)
        append(options.csv, rows)
        print(f"{partition} {method} seed {seed}: {rows[-1]['accuracy']:.3f} in {rows[-1]['cpu_s']} s", flush=True)


if __name__ == "__main__":
    main()
