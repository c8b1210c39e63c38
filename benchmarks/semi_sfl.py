"""Semi-SFL's claims on small real data, on a CPU: MNIST, the paper's CNN at a quarter of its widths, 100 labels.

Semi-SFL with and without adaptation of K_s, without clustering regularisation, and FedSwitch-SL, SemiFL and supervised
training alone, on the same partitions and initial weights; IID and Dir(0.1).

``python benchmarks/semi_sfl.py --root DATA``: one row per evaluated round is appended to the CSV file when a run has
ended, and runs that are in the file are not repeated. ``--report 0.9`` reads the file: the table, with the traffic to
an accuracy of 90 %, and the plot. ``--splits``: bytes by split index.
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fedssl import (
    SVHNCNN,
    ClientDirichlet,
    Cosine,
    FederatedDataModule,
    FederatedTrainer,
    FedSwitchSL,
    Iid,
    SemiFL,
    SemiSFL,
)  # fmt: skip
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks import GlobalUpdateFrequency
from lightning_fedssl.hooks import FederatedCallback
from lightning_fedssl.models import VGG16, AlexNet
from lightning_fedssl.models.split import split

RESULTS = Path(__file__).resolve().parent / "results" / "semi_sfl.csv"
COLUMNS = (
    "partition", "method", "seed", "round", "accuracy", "upload_bytes", "download_bytes", "server_steps",
    "confident", "impurity", "server_loss", "client_loss", "seconds",
)  # fmt: skip
PARTITIONS: dict[str, Any] = {"iid": Iid, "dir0.1": partial(ClientDirichlet, alpha=0.1)}
ROUNDS, LABELS, CLIENTS, ACTIVE, STEPS, BATCH, EVERY = 40, 100, 20, 5, 10, 32, 2
SPLIT: dict[str, Any] = {"split": 2, "server_steps": STEPS, "client_steps": STEPS, "threshold": 0.95}
CONTRAST: dict[str, Any] = {"queue_size": ACTIVE * BATCH}
METHODS: dict[str, tuple[type[FederatedAlgorithm], dict[str, Any]]] = {
    "supervised-only": (FedSwitchSL, SPLIT | {"client_steps": 0}),
    "SemiFL": (SemiFL, {"client_epochs": 1, "server_epochs": STEPS * BATCH / LABELS, "server_phase": "before"}),
    "FedSwitch-SL": (FedSwitchSL, SPLIT),
    "Semi-SFL": (SemiSFL, SPLIT | CONTRAST),
    "Semi-SFL, no clustering": (SemiSFL, SPLIT | CONTRAST | {"clustering": 0.0}),
    "Semi-SFL, adaptive K_s": (SemiSFL, SPLIT | CONTRAST | {"server_steps": None}),
}
"""SemiFL keeps the other options of its own paper; an IID client's epoch is as many images as STEPS batches."""


def adaptation() -> GlobalUpdateFrequency:
    """The paper's schedule at this length: a start at 1.6 times the constant K_s, milestones at the same shares."""
    milestones = tuple(ROUNDS * share // 100 for share in (15, 25, 40, 60, 70))
    return GlobalUpdateFrequency(start=STEPS * 80 // 50, milestones=milestones, window=3)


class Curve(FederatedCallback):
    """Notes what the CSV file gets of every evaluated round; traffic adds up."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.traffic = {"upload_bytes": 0.0, "download_bytes": 0.0}

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Note a round."""
        for name in self.traffic:
            self.traffic[name] += metrics.get(f"communication/{name}", 0.0)
        if "val/accuracy" in metrics:
            self.rows.append(
                {
                    "round": trainer.round_index,
                    "accuracy": metrics["val/accuracy"],
                    "server_steps": metrics.get("server/steps", STEPS),
                    "confident": metrics.get("client/mask_rate"),
                    "impurity": metrics.get("pseudo_label/impurity"),
                    "server_loss": metrics.get("server/loss"),
                    "client_loss": metrics.get("client/loss"),
                    **self.traffic,
                }
            )


def run(options: argparse.Namespace, partition: str, method: str, seed: int) -> list[dict[str, Any]]:
    """One run's curve."""
    lightning.seed_everything(seed, verbose=False)
    curve, (kind, settings) = Curve(), METHODS[method]
    data = FederatedDataModule(
        "mnist", root=options.root, num_clients=CLIENTS, num_labels=LABELS, partition=PARTITIONS[partition](),
        server_batch_size=BATCH, client_batch_size=BATCH, validation="test",
        max_train_images=LABELS + CLIENTS * STEPS * BATCH, max_test_images=1000,
    )  # fmt: skip
    algorithm = kind(
        network=partial(SVHNCNN, width=8, hidden=128),
        optimizer=partial(torch.optim.SGD, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=Cosine(final=0.25),
        **settings,
    )
    callbacks: list[Any] = [curve, *([adaptation()] if settings.get("server_steps", 0) is None else [])]
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=options.rounds, clients_per_round=ACTIVE, accelerator="cpu", logger=False, callbacks=callbacks,
            default_root_dir=folder, enable_progress_bar=False, check_val_every_n_rounds=EVERY,
        )  # fmt: skip
        trainer.fit(algorithm, data)
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise SystemExit("stopped: the run in hand is not kept")
    who = {"partition": partition, "method": method, "seed": seed, "seconds": round(time.process_time() - started, 1)}
    return [{**row, **who} for row in curve.rows]


def wanted(seeds: list[int]) -> Iterator[tuple[str, str, int]]:
    """Every run, a seed at a time; the clients' partition does not matter to supervised training alone."""
    for seed, (partition, method) in product(seeds, product(PARTITIONS, METHODS)):
        if method != "supervised-only" or partition == "iid":
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


def read() -> list[dict[str, str]]:
    """The rows so far."""
    if not RESULTS.exists():
        return []
    with RESULTS.open() as file:
        return list(csv.DictReader(file))


def append(rows: list[dict[str, Any]]) -> None:
    """Add a run's rows, with a header if the file is new."""
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def report(target: float) -> None:
    """Print the table and draw the curves of what has been run so far."""
    import matplotlib.pyplot as plt

    curves: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    for row in read():
        curves.setdefault((row["partition"], row["method"]), {}).setdefault(row["seed"], []).append(row)
    header = ("partition", "method", "accuracy", "seed by seed", f"round of {target:.0%}", "MiB by then")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    figure, axes = plt.subplots(1, len(PARTITIONS), figsize=(11, 4), sharey=True, squeeze=False)
    for (partition, method), runs in curves.items():
        last = [float(rows[-1]["accuracy"]) for rows in runs.values()]
        reached = [next((row for row in rows if float(row["accuracy"]) >= target), None) for rows in runs.values()]
        arrived = [row for row in reached if row is not None]
        traffic = [(float(row["upload_bytes"]) + float(row["download_bytes"])) / 2**20 for row in arrived]
        when = "not by all |"
        if arrived == reached:
            when = f"{mean(int(row['round']) for row in arrived):.0f} | {mean(traffic):.0f}"
        spread = f" ± {pstdev(last) * 100:.1f}" if len(last) > 1 else ""
        each = ", ".join(f"{100 * value:.1f}" for value in last)
        print(f"| {partition} | {method} | {100 * mean(last):.1f}{spread} | {each} | {when} |")
        rounds = [int(row["round"]) for row in next(iter(runs.values()))]
        height = [mean(float(rows[i]["accuracy"]) for rows in runs.values()) for i in range(len(rounds))]
        axes[0][list(PARTITIONS).index(partition)].plot(rounds, height, label=f"{method} ({len(runs)})")
    for axis, name in zip(axes[0], PARTITIONS, strict=True):
        axis.set(title=f"MNIST, {LABELS} labels, {name}", xlabel="round", ylabel="test accuracy")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


def main() -> None:
    """Run what is missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--splits", action="store_true", help="print the split sweep instead")
    parser.add_argument("--report", type=float, metavar="TARGET", help="tables and the plot instead, for an accuracy")
    parser.add_argument("--limit", type=int, default=1000, help="runs at most")
    options = parser.parse_args()
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.splits:
        return splits()
    if options.report is not None:
        return report(options.report)
    done = {(row["partition"], row["method"], int(row["seed"])) for row in read()}
    missing = [one for one in wanted(options.seeds) if one not in done and one[1] in options.methods]
    for partition, method, seed in missing[: options.limit]:
        rows = run(options, partition, method, seed)
        append(rows)
        print(f"{partition} {method} seed {seed}: {rows[-1]['accuracy']:.3f} in {rows[-1]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
