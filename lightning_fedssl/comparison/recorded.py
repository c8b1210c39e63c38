"""Finished runs that are known from the CSV files of other comparisons, such as those of another machine."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.results import LabelPoint, Point, Result

Row = dict[str, str]
Key = tuple[str, int]
"""An entry's label and a seed."""

_Point = TypeVar("_Point", Point, LabelPoint)

_HASHES = ("partition", "initial_weights", "code", "run")
"""Columns without which nobody can tell whether a run is comparable."""

_NAMED = 3
"""The most runs that a line of the log names."""


@dataclass(frozen=True)
class RecordedRun:
    """A row of ``results.csv`` whose run has finished.

    Attributes:
        folder: The folder of the file.
        row: The cells by column.
        result: The result, with its curves.
    """

    folder: Path
    row: Row
    result: Result

    @property
    def key(self) -> Key:
        """The entry's label, and the seed."""
        return self.row["label"], int(self.row["seed"])


def read_folder(folder: Path) -> list[RecordedRun]:
    """The finished runs in the CSV files of a comparison, in the order of ``results.csv``.

    Args:
        folder: The ``--output`` of the comparison.

    Raises:
        ValueError: If the folder has no ``results.csv``, or a file is no table of a comparison.
    """
    if not (folder / "results.csv").is_file():
        raise ValueError(f"{folder} has no results.csv: give the --output of a comparison that has ended")
    try:
        curves = _points(folder / "curves.csv", lambda row: _point(Point, row))
        labels = _points(folder / "pseudo_labels.csv", lambda row: _point(LabelPoint, row))
        rows = [row for row in _rows(folder / "results.csv") if row["status"] == "finished"]
        if missing := [name for name in _HASHES if rows and not rows[0].get(name)]:
            raise ValueError(f"{missing[0]} is missing")
        return [RecordedRun(folder, row, _result(row, curves, labels)) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: its CSV files are no tables of a comparison ({error})") from error


def take(
    runs: Sequence[Run], recorded: Iterable[RecordedRun], say: Callable[[str], None] = lambda line: None
) -> list[Outcome]:
    """The outcomes of those runs that are recorded, by label and seed.

    Settings and code are not compared, only named: they may differ where the numbers would not, and the columns ``run``
    and ``code`` of ``results.csv`` have their hashes.

    Args:
        runs: The runs of a suite.
        recorded: Finished runs.
        say: Is called with a line for the user on runs that the suite does not have, and on other settings or code.

    Raises:
        ValueError: If a recorded run began with another partition or other initial weights, or if two folders have
            different results of a run.
    """
    by_key: dict[Key, RecordedRun] = {}
    for one in recorded:
        known = by_key.setdefault(one.key, one)
        if _accuracies(known.result) != _accuracies(one.result):
            raise ValueError(
                f"{_name(one)}: {known.folder} and {one.folder} have different results; leave one of the folders out, "
                "or delete the row that does not count from its results.csv"
            )
    planned = {run.key: run for run in runs}
    for one in by_key.values():
        if one.key in planned:
            _check_start(one, planned[one.key])
    if unknown := [one for key, one in by_key.items() if key not in planned]:
        say(f"recorded, but not in the suite: {_names(unknown)}")
    found = {key: one for key, one in by_key.items() if key in planned}
    if other := [one for key, one in found.items() if one.row["run"] != planned[key].folder.name]:
        say(f"recorded with other settings or by other code (see run and code in results.csv): {_names(other)}")
    return [Outcome(_as_recorded(planned[key], one), one.result, "recorded") for key, one in found.items()]


def _check_start(one: RecordedRun, run: Run) -> None:
    expected = {
        "another partition": (one.row["partition"], run.start.partition),
        "other initial weights": (one.row["initial_weights"], run.start.weights_hash),
    }
    if differing := [what for what, (found, whole) in expected.items() if not whole.startswith(found)]:
        raise ValueError(
            f"{_name(one)}: the run in {one.folder} began with {' and '.join(differing)} than this suite gives; leave "
            "the folder out to train it again"
        )


def _as_recorded(run: Run, one: RecordedRun) -> Run:
    """The run under the name and code with which it was trained."""
    return replace(run, folder=run.folder.with_name(one.row["run"]), code=one.row["code"])


def _accuracies(result: Result) -> list[float]:
    return [result.test_accuracy, result.test_loss, *(point.accuracy for point in result.curve)]


def _name(one: RecordedRun) -> str:
    label, seed = one.key
    return f"{label}, seed {seed}"


def _names(runs: Sequence[RecordedRun]) -> str:
    """The names of the first runs, and how many more there are."""
    more = f"; and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return "; ".join(map(_name, runs[:_NAMED])) + more


def _result(row: Row, curves: dict[Key, list[Point]], labels: dict[Key, list[LabelPoint]]) -> Result:
    key = row["label"], int(row["seed"])
    return Result(
        number(row["test_accuracy"]), number(row["test_loss"]), int(row["rounds"]), curves[key], number(row["bytes"]),
        number(row["simulated_seconds"]), number(row["wall_seconds"]), labels[key],
    )  # fmt: skip


def _points(path: Path, point: Callable[[Row], _Point]) -> dict[Key, list[_Point]]:
    """The points of every run in a file; none if the file is missing."""
    found: dict[Key, list[_Point]] = defaultdict(list)
    for row in _rows(path) if path.is_file() else []:
        found[row["label"], int(row["seed"])].append(point(row))
    return found


def _point(kind: type[_Point], row: Row) -> _Point:
    values = {field.name: number(row[field.name]) for field in fields(kind)}
    return kind(**{**values, "round": int(row["round"])})  # type: ignore[arg-type]


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(cell: str) -> float:
    """A number of a table; NaN where the cell is empty."""
    return float(cell) if cell else math.nan
