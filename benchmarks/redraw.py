"""Draws the curves of a comparison again from its CSV files: ``python benchmarks/redraw.py FOLDER``.

FOLDER holds ``results.csv`` and ``curves.csv``, as ``lightning-fedssl compare`` writes them. With ``--group`` only the
groups whose title starts with a text are drawn, with ``--without`` not all entries, with ``--output`` into another
file. ``lightning-fedssl compare SUITE --recorded [FOLDER] --only []`` writes all tables and plots again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lightning_fedssl.comparison.plots import KINDS, Groups, draw_curves
from lightning_fedssl.comparison.recorded import read_folder
from lightning_fedssl.comparison.report import Line
from lightning_fedssl.comparison.suite import SuiteEntry


def read_groups(folder: Path, start: str, without: Sequence[str] = ()) -> Groups:
    """The finished runs of a comparison by group, method and seed.

    Args:
        folder: The folder of the CSV files.
        start: The beginning of the groups' titles.
        without: Labels of entries to leave out.
    """
    groups: dict[str, dict[str, Line]] = {}
    for run in read_folder(folder):
        label, seed = run.key
        if run.row["group"].startswith(start) and label not in without:
            role: Literal["method", "bound"] = "bound" if run.row["role"] == "bound" else "method"
            entry = SuiteEntry(label, run.row["config"], role)
            line = groups.setdefault(run.row["group"], {}).setdefault(label, Line(entry, {}))
            line.results[seed] = run.result
    return {title: list(lines.values()) for title, lines in groups.items()}


def main() -> None:
    """Read the tables and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", default="", help="draw only groups whose title starts with this text")
    parser.add_argument("--without", nargs="*", default=[], help="labels of entries to leave out")
    parser.add_argument("--title", default="", help="the figure's title")
    parser.add_argument("--kind", choices=list(KINDS), default="rounds", help="what the curves show")
    parser.add_argument("--target", type=float, default=None, help="an accuracy to mark, from 0 to 1")
    parser.add_argument("--output", type=Path, help="the PNG file; KIND.png of the folder if left out")
    options = parser.parse_args()
    groups = read_groups(options.folder, options.group, options.without)
    path = options.output or options.folder / f"{options.kind}.png"
    draw_curves(path, options.title, groups, options.kind, options.target)


if __name__ == "__main__":
    main()
