"""A short run of SemiFL on CIFAR-10 with 4,000 labels: does the federation learn, on a laptop's CPU?

The run is ``semifl_cifar10_4000.yaml`` with the :data:`CHANGES`. The control is the same run with clients that never
train. The script needs the real images; a stopped run resumes.

    python benchmarks/cifar10_short.py --root data
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

import command_line
from command_line import RESULTS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIG = "semifl_cifar10_4000.yaml"

CHANGES = {
    "the three-layer CNN of width 16, 24,346 parameters, instead of WRN-28-2": (
        "--model.network=CNN",
        "--model.network.width=16",
        "--model.network.norm=static_batch",
    ),
    "the cosine schedule over these rounds instead of 800": (),
    "static batch-norm statistics of the server's images alone (Table 3: no loss at 4,000 labels)": (
        "--trainer.callbacks=StaticBatchNorm",
        "--trainer.callbacks.source=server",
    ),
}
"""The differences from the configuration, in addition to the number of rounds, with their options."""

RUNS = {"semifl": (), "server_alone": ("--model.threshold=1",)}
"""The runs and their options. With threshold 1 no image is confident, so that only the server trains."""

COLUMNS = {
    "val/accuracy": "test accuracy",
    "pseudo_label/accuracy": "pseudo-labels right",
    "pseudo_label/confident_accuracy": "confident ones right",
    "client/mask_rate": "confident",
    "client/trained": "clients training",
    "client/loss": "client loss",
    "server/loss": "server loss",
    "time/round_s": "seconds",
}
"""The scalars that are written, and their names in the table. The configuration validates on the test images."""


def main() -> None:
    """Start or resume the runs, then write the curves, the figure and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder that holds cifar-10-batches-py")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks/cifar10_short"), help="the runs' folder")
    arguments = parser.parse_args()
    runs = {name: _run(arguments, arguments.work / name, options) for name, options in RUNS.items()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    _write_csv(RESULTS / "cifar10_short.csv", runs)
    _draw(RESULTS / "cifar10_short.png", runs)
    own = command_line.command(rounds=arguments.rounds, seed=arguments.seed)
    report = [*_head(arguments.rounds, arguments.seed, runs), *_table(runs["semifl"])]
    command_line.write(RESULTS / "cifar10_short.md", [*report, "", f"`{own}` on {command_line.machine()}."])


def _run(arguments: argparse.Namespace, folder: Path, more: tuple[str, ...]) -> list[Row]:
    options = [option for changed in CHANGES.values() for option in changed]
    options += ["--trainer.accelerator=cpu", f"--trainer.max_rounds={arguments.rounds}"]
    options += [f"--seed_everything={arguments.seed}", f"--data.root={Path(arguments.root).resolve()}", *more]
    if any(folder.glob("lightning_logs/version_*/checkpoints/last.ckpt")):
        options.append("--ckpt_path=last")
    command_line.fit(CONFIG, folder, *options)
    return command_line.rounds(folder)


def _write_csv(path: Path, runs: dict[str, list[Row]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "round", *COLUMNS])
        for name, rows in runs.items():
            for row in rows:
                values = (f"{row[key]:.6g}" if key in row else "" for key in COLUMNS)
                writer.writerow([name, int(row["step"]), *values])


def _draw(path: Path, runs: dict[str, list[Row]]) -> None:
    figure, axes = command_line.new_figure("SemiFL on CIFAR-10 with 4,000 labels, small CNN", "per cent")
    for key, style in zip(list(COLUMNS)[:4], ("-o", "--", ":", "-."), strict=True):
        _plot(axes, runs["semifl"], key, style, COLUMNS[key])
    _plot(axes, runs["server_alone"], "val/accuracy", "-", "test accuracy, server alone")
    axes.set_ylim(0, 100)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.07))
    figure.savefig(path, dpi=120)


def _plot(axes: Axes, rows: list[Row], key: str, style: str, label: str) -> None:
    values = [100 * row.get(key, float("nan")) for row in rows]
    axes.plot([row["step"] for row in rows], values, style, markersize=3, label=label)


def _head(rounds: int, seed: int, runs: dict[str, list[Row]]) -> list[str]:
    last, alone = runs["semifl"][-1], runs["server_alone"][-1]
    confident = last.get("client/mask_rate", 0.0)
    minutes = sum(row.get("time/round_s", 0.0) for row in runs["semifl"]) / 60
    return [
        f"# SemiFL on CIFAR-10, {rounds} rounds with a small CNN",
        "",
        f"`configs/{CONFIG}` for {rounds} rounds, seed {seed}, with these changes and no others:",
        "",
        *(f"* {change}" for change in CHANGES),
        "",
        f"Test accuracy {last['test/accuracy']:.1%} after round {int(last['step'])}, the last one; nothing was chosen",
        f"on the test images. The same with clients that never train: {alone['test/accuracy']:.1%}. So short a run",
        f"learns from the labels: in the last round {confident:.1%} of the clients' images had a confident",
        f"pseudo-label. Its rounds took {minutes:.1f} minutes. The published 93.1 % needs 800 rounds of WRN-28-2.",
        "",
        "![curve](cifar10_short.png)",
        "",
    ]


def _table(rows: list[Row]) -> list[str]:
    lines = ["| round | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [_cell(key, row[key]) if key in row else "-" for key in COLUMNS]
        lines.append(f"| {int(row['step'])} | " + " | ".join(cells) + " |")
    return lines


def _cell(key: str, value: float) -> str:
    if key == "client/trained":
        return f"{value:.0f}"
    return f"{value:.1%}" if "accuracy" in key or key.endswith("rate") else f"{value:.3g}"


if __name__ == "__main__":
    main()
