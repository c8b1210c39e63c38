"""Reads the CSVs in benchmarks/results, and computes the numbers of the results pages from them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, str]
"""A row of a CSV by its columns."""

IN_PER_CENT = ("fed_shvr_table1.csv", "fed_shvr_curves.csv")
"""Files whose accuracies are in per cent; the others have them from 0 to 1."""

_RUN = ("group", "label", "claim", "dataset", "partition", "method", "cell", "split", "reading", "variant", "seed")
"""Columns that tell runs apart in a file with a row for each round."""


def read(source: str) -> list[Row]:
    """The rows of a CSV below benchmarks/results; none if nobody has written it yet."""
    path = RESULTS / source
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def runs(source: str, where: Mapping[str, Any], rounds: int | None = None) -> list[Row]:
    """The runs of a CSV with these values, one row each, with ``points`` (accuracy in per cent) and ``status``.

    Args:
        source: The file below benchmarks/results. If it has a row for each round, a run is its last row.
        where: Values by column; a list names several.
        rounds: The planned number of rounds: a run that ended earlier is *stopped*.
    """
    found = [row for row in read(source) if all(_has(row, column, value) for column, value in where.items())]
    if found and "round" in found[0]:
        found = list({tuple(row.get(column) for column in _RUN): row for row in found}.values())
    return [_measured(row, source, rounds) for row in found]


def _has(row: Row, column: str, value: Any) -> bool:
    if column not in row:
        raise ValueError(f"docs/claims.yaml names the column {column}, but the CSV has {', '.join(row)}")
    return row[column] in (list(map(str, value)) if isinstance(value, list) else [str(value)])


def _measured(row: Row, source: str, planned: int | None) -> Row:
    accuracy = row.get("test_accuracy") or row.get("accuracy") or ""
    points = str(float(accuracy) * (1 if source in IN_PER_CENT else 100)) if accuracy else ""
    done = row.get("rounds") or row.get("round") or ""
    status = row.get("status") or ("stopped" if planned and done and int(done) < planned else "finished")
    return {**row, "points": points, "status": status, "rounds": done}


def finished(rows: Iterable[Row]) -> dict[str, float]:
    """The accuracy of every finished run by its seed, in per cent."""
    return {row["seed"]: float(row["points"]) for row in rows if row["status"] == "finished" and row["points"]}


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation (n - 1); the mean alone of one value.

    Args:
        values: At least one value.
        sign: ``+`` prints the sign of the mean.
    """
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{deviation}"


def cell(rows: Sequence[Row], planned: int | None = None) -> str:
    """Mean ± standard deviation (number of seeds) of the finished runs, then the others; *not run* if there is none.

    Args:
        rows: The runs of :func:`runs`.
        planned: The number of seeds that are planned.
    """
    values = finished(rows)
    parts = [f"{spread(list(values.values()))} ({number_of(values, planned)})"] if values else []
    return "; ".join([*parts, *unfinished(rows)]) or "not run"


def difference(rows: Sequence[Row], reference: Sequence[Row]) -> dict[str, float]:
    """The differences of accuracies in points, over the seeds of both."""
    ours, theirs = finished(rows), finished(reference)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def number_of(values: Mapping[str, float], planned: int | None) -> str:
    """The number of seeds, beside the planned number where some are missing."""
    return str(len(values)) if not planned or len(values) >= planned else f"{len(values)} of {planned}"


def unfinished(rows: Iterable[Row]) -> list[str]:
    """What became of the runs that have not finished."""
    return [
        f"seed {row['seed']}: {row['status']} after {row['rounds'] or 0} rounds"
        for row in rows
        if row["status"] != "finished" or not row["points"]
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
