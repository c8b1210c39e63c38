"""Numbers of runs: pure functions from logged scalars to what tables and plots show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_fedssl.comparison import records

if TYPE_CHECKING:
    from lightning_fedssl.comparison.plan import Run

_BYTES = ("communication/upload_bytes", "communication/download_bytes")
_SIMULATED = "system/seconds"


@dataclass(frozen=True)
class Point:
    """A run after a round at which it was evaluated.

    Attributes:
        round: The round.
        accuracy: Validation accuracy, ``val/accuracy``, from 0 to 1.
        bytes: Sent by and to all clients since the beginning.
        seconds: Simulated since the beginning; NaN where nothing simulates time.
    """

    round: int
    accuracy: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        test_accuracy: Of the last round's model, from 0 to 1.
        test_loss: Of the same.
        rounds: Rounds trained.
        curve: The run after every evaluated round.
        bytes: Sent by and to all clients in all rounds.
        seconds: Simulated over all rounds; NaN where nothing simulates time.
        wall_seconds: Wall time of the rounds.
    """

    test_accuracy: float
    test_loss: float
    rounds: int
    curve: list[Point] = field(repr=False)
    bytes: float
    seconds: float
    wall_seconds: float

    @property
    def best(self) -> Point | None:
        """The first of the points with the highest validation accuracy; None without validation."""
        return max(self.curve, key=lambda point: point.accuracy, default=None)


def result_of(run: Run) -> Result | None:
    """The result of a run, read from its folder; None if it is not finished."""
    rows = records.rounds(run.folder)
    return None if records.unfinished(rows) else result_from(rows)


def result_from(rows: Sequence[records.Row]) -> Result:
    """The result of a finished run.

    Args:
        rows: The scalars of its rounds, in order.
    """
    curve, sent, seconds = [], 0.0, math.nan
    for row in rows:
        sent += sum(row.get(name, 0.0) for name in _BYTES)
        seconds = row.get(_SIMULATED, math.nan)  # logged as a sum over the rounds so far
        if "val/accuracy" in row:
            curve.append(Point(int(row["step"]), row["val/accuracy"], sent, seconds))
    return Result(
        test_accuracy=rows[-1]["test/accuracy"],
        test_loss=rows[-1]["test/loss"],
        rounds=int(rows[-1]["step"]),
        curve=curve,
        bytes=sent,
        seconds=seconds,
        wall_seconds=sum(row.get("time/round_s", 0.0) for row in rows),
    )


def first_reaching(curve: Sequence[Point], target: float) -> Point | None:
    """The first point whose accuracy is at least the target; None if there is none."""
    return next((point for point in curve if point.accuracy >= target), None)


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a few values.

    Attributes:
        mean: The mean.
        std: The standard deviation with n - 1 in the denominator; NaN for a single value.
        count: n.
    """

    mean: float
    std: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation (n - 1).

    Args:
        values: At least one.
    """
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), std, len(values))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Spread | None:
    """Mean and spread of the differences to a reference over the seeds that both have; None if there is no such seed.

    Runs of one seed share partition and initial weights, so that their difference spreads less than either of them.

    Args:
        values: By seed.
        reference: By seed.
    """
    seeds = sorted(values.keys() & reference.keys())
    return spread([values[seed] - reference[seed] for seed in seeds]) if seeds else None


def median_to_target(costs: Sequence[float | None]) -> float | None:
    """The median over runs of what it cost to reach a target, where a run that did not is above all others.

    Unlike the mean of those that did, it does not get better when hard runs fail. With an even number of runs it is
    the upper of the two in the middle. None: at least half of the runs did not reach it.

    Args:
        costs: One for every run; None where it was not reached.
    """
    return sorted(costs, key=lambda cost: math.inf if cost is None else cost)[len(costs) // 2] if costs else None
