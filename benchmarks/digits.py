"""Compares SemiFL on the bundled digits with its partially supervised bound over seeds: accuracy, seconds, memory.

Every run is a separate process, started by the same command line that a user would type.

    python benchmarks/digits.py --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import command_line
from command_line import RESULTS, Cost, Row

METHODS = {"semifl_digits.yaml": "SemiFL", "supervised_digits.yaml": "partially supervised bound"}
"""The configurations and their names in the table."""


@dataclass(frozen=True)
class SeedRun:
    """One seed of one configuration.

    Attributes:
        rows: The scalars of every round.
        cost: Time and memory of the run.
    """

    rows: list[Row]
    cost: Cost

    @property
    def accuracy(self) -> float:
        """Accuracy of the last model on the test images, in per cent."""
        return 100 * self.rows[-1]["test/accuracy"]


def main() -> None:
    """Run everything, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, .. of each configuration")
    parser.add_argument("--rounds", type=int, help="instead of the configurations' own number")
    arguments = parser.parse_args()
    options = [f"--trainer.max_rounds={arguments.rounds}"] if arguments.rounds else []
    runs = {config: [_run(config, seed, options) for seed in range(arguments.seeds)] for config in METHODS}
    _draw(RESULTS / "digits.png", runs)
    own = command_line.command(seeds=arguments.seeds, rounds=arguments.rounds)
    command_line.write(RESULTS / "digits.md", _report(runs, own))


def _run(config: str, seed: int, options: list[str]) -> SeedRun:
    with tempfile.TemporaryDirectory() as folder:
        cost = command_line.fit(config, Path(folder), f"--seed_everything={seed}", *options)
        return SeedRun(command_line.rounds(Path(folder)), cost)


def _report(runs: dict[str, list[SeedRun]], command: str) -> list[str]:
    num_seeds = len(next(iter(runs.values())))
    seeds = " | ".join(f"seed {seed}" for seed in range(num_seeds))
    lines = [
        "# Handwritten digits, 50 labels",
        "",
        "Accuracy of the last round's model on the 355 test images, in per cent; std is over seeds (n - 1). Both see",
        "the same 50 labels under the same seed. Seconds and memory are of whole processes, imports included, and of",
        "the largest run.",
        "",
        f"| configuration | rounds | mean | std | {seeds} | seconds | MiB |",
        "|---" * (6 + num_seeds) + "|",
        *(_line(config, seed_runs) for config, seed_runs in runs.items()),
        "",
        "![accuracy over rounds](digits.png)",
        "",
        f"`{command}` on {command_line.machine()}.",
    ]
    return lines


def _line(config: str, runs: list[SeedRun]) -> str:
    accuracies = [run.accuracy for run in runs]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    cells = [
        f"{METHODS[config]} (`{config}`)",
        f"{runs[0].rows[-1]['step']:.0f}",
        f"{statistics.mean(accuracies):.1f}",
        f"{spread:.1f}",
        *(f"{accuracy:.1f}" for accuracy in accuracies),
        f"{max(run.cost.seconds for run in runs):.0f}",
        f"{max(run.cost.mebibytes for run in runs):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _draw(path: Path, runs: dict[str, list[SeedRun]]) -> None:
    title = "digits, 50 labels: mean and range over seeds"
    figure, axes = command_line.new_figure(title, "accuracy on held-out images, per cent")
    for config, seed_runs in runs.items():
        steps = [row["step"] for row in seed_runs[0].rows]
        curves = list(zip(*([100 * row["val/accuracy"] for row in run.rows] for run in seed_runs), strict=True))
        (line,) = axes.plot(steps, [statistics.mean(values) for values in curves], label=METHODS[config])
        low, high = [min(values) for values in curves], [max(values) for values in curves]
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
