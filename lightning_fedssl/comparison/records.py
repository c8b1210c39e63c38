"""Reads the scalars that a run has logged in every round. This module imports no slow package."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, float]
"""The scalars of one round by name, and the round as ``step``."""


def versions(folder: Path) -> list[Path]:
    """The version folders below a ``default_root_dir``, oldest first; a resumed run has several."""
    found = (path for path in (folder / "lightning_logs").glob("version_*") if path.name[8:].isdecimal())
    return sorted(found, key=lambda path: int(path.name[8:]))


def rounds(folder: Path) -> list[Row]:
    """The scalars of every round, in order; if a resumed run repeated a round, the later version's scalars win.

    Args:
        folder: The run's ``default_root_dir``.
    """
    merged: dict[int, Row] = {}
    for version in versions(folder):
        for row in _rows(version / "metrics.csv"):
            merged[int(row["step"])] = merged.get(int(row["step"]), {}) | row
    return [merged[step] for step in sorted(merged)]


def unfinished(rows: Sequence[Row], whole: bool = True) -> str:
    """The reason why the scalars are not those of a finished run; empty if they are.

    Args:
        rows: The scalars of the rounds, as :func:`rounds` returns them.
        whole: Whether a scalar of the test is required; if not, only missing rounds are reported.
    """
    if not rows:
        return "nothing was logged"
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        return "rounds are missing"
    return "there is no test" if whole and not any(name.startswith("test/") for name in rows[-1]) else ""


def _rows(path: Path) -> list[Row]:
    """The rows of a file, without those that a killed process did not finish: a row ends with its line."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = [_numbers(row) for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines())]
    return [row for row in rows if row.get("step", math.nan).is_integer()]


def _numbers(row: dict[str, str]) -> Row:
    try:
        return {name: float(value) for name, value in row.items() if value}
    except (TypeError, ValueError):
        return {}
