"""Tables of the rows that ``real_tasks.py`` writes, as Markdown; intervals are over tasks and seeds.

python benchmarks/real_report.py judging.csv --by task clients          # means over label counts and seeds
python benchmarks/real_report.py development.csv --by kind candidate    # which setting is best
python benchmarks/real_report.py judging.csv --by task --per_class 3    # gains with few labels
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

ACCURACIES = ("majority", "logistic_regression", "extra_trees", "bound", "with_clients", "chosen")
REFERENCE = ("bound", "logistic_regression", "raw_logistic_regression")

Row = dict[str, str]


def differences(rows: Sequence[Row], column: str, references: Sequence[str]) -> NDArray[np.float64]:
    """A column minus the reference that is best in the mean of these rows, row by row.

    Args:
        rows: The runs of one line of the table.
        column: An accuracy.
        references: Accuracies to compare with.
    """
    values = {name: np.array([float(row.get(name, "nan")) for row in rows]) for name in (column, *references)}
    known = [name for name in references if not np.isnan(values[name]).any()]
    best = max(known, key=lambda name: values[name].mean())
    return np.asarray(values[column] - values[best])


def by_draw(rows: Sequence[Row], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over the rows of one task and seed, which share test samples and labels whatever their clients hold.

    Args:
        rows: The runs.
        values: One of each.
    """
    draws = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        draws[row["task"], row["seed"]].append(value)
    return np.array([np.mean(of_draw) for of_draw in draws.values()])


def interval(found: NDArray[np.float64]) -> str:
    """Mean and 95 % interval (Student), bold if it excludes 0."""
    if len(found) < 2:
        return f"{found.mean():+.1f}"
    half = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    text = f"{found.mean():+.1f} ({found.mean() - half:+.1f} to {found.mean() + half:+.1f})"
    return f"**{text}**" if abs(found.mean()) > half else text


def report(rows: Sequence[Row], by: Sequence[str]) -> list[str]:
    """The lines of a table.

    Args:
        rows: The runs.
        by: The columns that name a line; its runs are averaged.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in by)].append(row)
    head = [
        *by, "runs", *(name.replace("_", " ") for name in ACCURACIES), "with clients - bound",
        "chosen - best of bound, logistic regression", "seconds",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, runs in groups.items():
        means = [f"{np.mean([float(run[column]) for run in runs]):.1f}" for column in ACCURACIES]
        compared = [differences(runs, "with_clients", ["bound"]), differences(runs, "chosen", REFERENCE)]
        gains = [by_draw(runs, values) for values in compared]
        seconds = f"{np.mean([float(run['seconds']) for run in runs]):.1f}"
        cells = [*name, str(len(runs)), *means, *map(interval, gains), seconds]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--by", nargs="+", default=["task", "clients"])
    parser.add_argument("--per_class", nargs="+")
    parser.add_argument("--candidates", nargs="+")
    options = parser.parse_args()
    with options.file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = [row for row in rows if not options.per_class or row["per_class"] in options.per_class]
    kept = [row for row in kept if not options.candidates or row["candidate"] in options.candidates]
    print(*report(kept, options.by), sep="\n")


if __name__ == "__main__":
    main()
