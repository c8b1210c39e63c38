"""Results of runs: from the scalars that a run has logged to the rows of the CSV files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fedssl.storage.files import versions

if TYPE_CHECKING:
    from lightning_fedssl.task import Task

Row = dict[str, float]
"""Numbers by name: the scalars of one round with the round as ``step``, or a row of a CSV file."""


def rounds(folder: Path) -> list[Row]:
    """The scalars of every round, in order.

    If a resumed run repeated a round, the later version's scalars win.

    Args:
        folder: The run's ``default_root_dir``.
    """
    merged: dict[int, Row] = {}
    for version in versions(folder):
        for row in _rows(version / "metrics.csv"):
            merged.setdefault(int(row["step"]), {}).update(row)
    return [merged[step] for step in sorted(merged)]


def is_finished(rows: Sequence[Row]) -> bool:
    """Whether the scalars are those of a finished run: every round, and the test."""
    return are_whole(rows) and any(name.startswith("test/") for name in rows[-1])


def are_whole(rows: Sequence[Row]) -> bool:
    """Whether there are scalars, and no round is missing."""
    return bool(rows) and [row["step"] for row in rows] == list(range(1, len(rows) + 1))


def curve(rows: Sequence[Row], task: Task) -> list[Row]:
    """A row for each round with a validation.

    Bytes and simulated seconds are those from round 1 on.

    Args:
        rows: The scalars of a run's rounds, in order.
        task: What its model predicts.
    """
    found = []
    sent = 0.0
    for row in rows:
        sent += _bytes(row)
        if f"val/{task.monitor}" in row:
            point = {"round": row["step"], task.monitor: row[f"val/{task.monitor}"], "bytes": sent}
            found.append(point | {"seconds": row.get("system/seconds", nan)})
    return found


def summary(rows: Sequence[Row], task: Task, target: float | None = None) -> Row:
    """The numbers of a finished run; NaN for what there is not.

    Args:
        rows: The scalars of its rounds, in order.
        task: What its model predicts.
        target: A value of the task's first metric on the validation images; the costs are those of
            the first round that is as good.
    """
    metric, last = task.monitor, rows[-1]
    sign = 1 if task.larger_is_better else -1
    points = curve(rows, task)
    best = max(points, key=lambda point: sign * point[metric], default={})
    goal = next((p for p in points if target is not None and sign * p[metric] >= sign * target), {})
    return {
        "rounds": last["step"],
        f"test_{metric}": last.get(f"test/{metric}", nan),
        "test_loss": last.get("test/loss", nan),
        f"best_{metric}": best.get(metric, nan),
        "best_round": best.get("round", nan),
        "target": nan if target is None else target,
        **{f"{cost}_to_target": goal.get(name, nan) for cost, name in _COSTS.items()},
        "server_steps": _total(rows, "server/steps"),
        "client_steps": _total(rows, "client/steps"),
        "bytes": sum(map(_bytes, rows)),
        # Logged as a sum over the rounds so far.
        "simulated_seconds": last.get("system/seconds", nan),
        "wall_seconds": sum(row.get("time/round_s", 0.0) for row in rows),
    }


def _total(rows: Sequence[Row], name: str) -> float:
    """The sum of a scalar over the rounds; NaN for a run of a version that did not log it."""
    return sum(row.get(name, nan) for row in rows)


_COSTS = {"rounds": "round", "bytes": "bytes", "seconds": "seconds"}


def _bytes(row: Row) -> float:
    """What all clients uploaded and downloaded in a round."""
    return row.get("communication/upload_bytes", 0.0) + row.get("communication/download_bytes", 0.0)


def _rows(path: Path) -> list[Row]:
    """The rows of a file, without those that a killed process did not finish: a row ends with its
    line.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = []
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        with suppress(TypeError, ValueError):
            numbers = {name: float(value) for name, value in row.items() if value}
            if numbers.get("step", nan).is_integer():
                rows.append(numbers)
    return rows
