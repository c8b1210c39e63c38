"""Draws the curves of a comparison again from its CSV files: ``python benchmarks/redraw.py FOLDER``.

FOLDER holds ``results.csv`` and ``curves.csv``, as ``lightning-fedssl compare`` writes them. With ``--group`` only the
groups whose title starts with a text are drawn, with ``--without`` not all entries, with ``--output`` into another
file.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lightning_fedssl.comparison.plots import Groups, draw_curves
from lightning_fedssl.comparison.report import Line
from lightning_fedssl.comparison.results import Point, Result
from lightning_fedssl.comparison.suite import SuiteEntry

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float:
    """A number; NaN where the cell is empty."""
    return float(text or "nan")


def read_groups(folder: Path, start: str, without: Sequence[str] = ()) -> Groups:
    """The finished runs of a comparison by group, method and seed.

    Args:
        folder: The folder of the CSV files.
        start: The beginning of the groups' titles.
        without: Labels of entries to leave out.
    """
    points: dict[tuple[str, str], list[Point]] = {}
    for row in read_rows(folder / "curves.csv"):
        point = Point(int(row["round"]), float(row["accuracy"]), number(row["bytes"]), number(row["seconds"]))
        points.setdefault((row["label"], row["seed"]), []).append(point)
    groups: dict[str, dict[str, Line]] = {}
    for row in read_rows(folder / "results.csv"):
        if row["group"].startswith(start) and row["label"] not in without and row["status"] == "finished":
            role: Literal["method", "bound"] = "bound" if row["role"] == "bound" else "method"
            line = groups.setdefault(row["group"], {}).setdefault(
                row["label"], Line(SuiteEntry(row["label"], row["config"], role), {})
            )
            line.results[int(row["seed"])] = Result(
                number(row["test_accuracy"]), number(row["test_loss"]), int(row["rounds"]),
                points.get((row["label"], row["seed"]), []), number(row["bytes"]), number(row["simulated_seconds"]),
                number(row["wall_seconds"]),
            )  # fmt: skip
    return {title: list(lines.values()) for title, lines in groups.items()}


def main() -> None:
    """Read the tables and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", default="", help="draw only groups whose title starts with this text")
    parser.add_argument("--without", nargs="*", default=[], help="labels of entries to leave out")
    parser.add_argument("--title", default="", help="the figure's title")
    parser.add_argument("--target", type=float, default=None, help="an accuracy to mark, from 0 to 1")
    parser.add_argument("--output", type=Path, help="the PNG file; rounds.png of the folder if left out")
    options = parser.parse_args()
    groups = read_groups(options.folder, options.group, options.without)
    draw_curves(options.output or options.folder / "rounds.png", options.title, groups, "rounds", options.target)


if __name__ == "__main__":
    main()
