"""Results of runs: pure functions from logged scalars to the numbers of tables and plots."""

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
_LABELS = ("client/mask_rate", "pseudo_label/confident_accuracy", "pseudo_label/accuracy")


@dataclass(frozen=True)
class Point:
    """One point of a run's curve: a round in which the model was evaluated.

    Attributes:
        round: The round.
        accuracy: Validation accuracy, ``val/accuracy``, from 0 to 1.
        bytes: Bytes uploaded and downloaded by all clients from round 1 to this round.
        seconds: Simulated seconds from round 1 to this round; NaN without a simulation of time.
    """

    round: int
    accuracy: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class LabelPoint:
    """The pseudo-labels that clients used in one round, as shares from 0 to 1; NaN for what a method does not log.

    Attributes:
        round: The round.
        mask_rate: Share of the clients' images whose pseudo-label is confident, ``client/mask_rate``.
        confident_accuracy: Share of the confident pseudo-labels that are right, ``pseudo_label/confident_accuracy``;
            also NaN in a round without a confident one.
        all_accuracy: Share of all pseudo-labels that are right, ``pseudo_label/accuracy``.
        round_s: Wall-clock time of the round in seconds.
    """

    round: int
    mask_rate: float
    confident_accuracy: float
    all_accuracy: float
    round_s: float


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        test_accuracy: Test accuracy of the last round's model, from 0 to 1; NaN if the method logs none.
        test_loss: Test loss of the last round's model; NaN if the method logs none.
        rounds: Number of rounds trained.
        curve: One point for every round with an evaluation.
        bytes: Bytes uploaded and downloaded by all clients in all rounds.
        seconds: Simulated seconds of all rounds; NaN without a simulation of time.
        wall_seconds: Wall-clock time of the rounds.
        labels: One point for every round in which clients labelled images.
    """

    test_accuracy: float
    test_loss: float
    rounds: int
    curve: list[Point] = field(repr=False)
    bytes: float
    seconds: float
    wall_seconds: float
    labels: list[LabelPoint] = field(default_factory=list, repr=False)

    @property
    def best(self) -> Point | None:
        """The point with the highest validation accuracy, the first one in a tie; None without validation."""
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
        test_accuracy=rows[-1].get("test/accuracy", math.nan),
        test_loss=rows[-1].get("test/loss", math.nan),
        rounds=int(rows[-1]["step"]),
        curve=curve,
        bytes=sent,
        seconds=seconds,
        wall_seconds=sum(row.get("time/round_s", 0.0) for row in rows),
        labels=[_label_point(row) for row in rows if row.keys() & set(_LABELS)],
    )


def _label_point(row: records.Row) -> LabelPoint:
    mask_rate, confident_accuracy, all_accuracy, seconds = (row.get(n, math.nan) for n in (*_LABELS, "time/round_s"))
    return LabelPoint(int(row["step"]), mask_rate, confident_accuracy, all_accuracy, seconds)


def first_reaching(curve: Sequence[Point], target: float) -> Point | None:
    """The first point whose accuracy is at least the target; None if there is none."""
    return next((point for point in curve if point.accuracy >= target), None)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of some values.

    Attributes:
        mean: The mean.
        std: The standard deviation with n - 1 in the denominator; NaN for a single value.
        count: n.
    """

    mean: float
    std: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation (n - 1) of values.

    Args:
        values: At least one value.
    """
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), std, len(values))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Spread | None:
    """Mean and standard deviation of the differences to a reference, over the seeds of both; None without such a seed.

    Runs of one seed share partition and initial weights, so that their difference usually varies less than the values.

    Args:
        values: Values by seed.
        reference: Values of the reference by seed.
    """
    seeds = sorted(values.keys() & reference.keys())
    return spread([values[seed] - reference[seed] for seed in seeds]) if seeds else None


def median_to_target(costs: Sequence[float | None]) -> float | None:
    """The median over runs of the cost of reaching a target; a run that did not reach it has an infinite cost.

    Unlike the mean over the runs that reached the target, the median does not improve when difficult runs fail. For an
    even number of runs it is the larger of the two middle values. It is None if at least half of the runs did not reach
    the target.

    Args:
        costs: The cost of every run; None for a run that did not reach the target.
    """
    return sorted(costs, key=lambda cost: math.inf if cost is None else cost)[len(costs) // 2] if costs else None
