"""Paired differences between runs of the same seeds, their 95 % interval, and what may be said of
them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 3
"""The fewest seeds of an interval: with two, that of Student's t is 13 times as wide as the
standard error."""


@dataclass(frozen=True)
class Paired:
    """Differences to a reference, over the seeds of both.

    Attributes:
        mean: Their mean.
        low: Lower end of the 95 % interval of the mean (Student's t); NaN with fewer than
            :data:`FEWEST` seeds.
        high: Its upper end, likewise.
        count: The number of seeds.
    """

    mean: float
    low: float
    high: float
    count: int


def interval(differences: Sequence[float]) -> Paired:
    """The mean of paired differences with its 95 % interval.

    Runs of one seed share partition and initial weights, so that their difference usually varies
    less than the values.

    Args:
        differences: At least one, each of another seed.
    """
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < FEWEST:
        return Paired(mean, math.nan, math.nan, count)
    from scipy.special import stdtrit  # needed by scikit-learn; a slow import

    half = float(stdtrit(count - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(count)
    return Paired(mean, mean - half, mean + half, count)


def verdict(differences: Sequence[float]) -> str:
    """What may be said of a claim that a method is better, from its paired differences to the
    other.

    * ``not run``, ``one run``, ``two runs``: too few seeds to decide.
    * ``met``: the 95 % interval is above 0.
    * ``contrary``: the interval is below 0.
    * ``undecided``: the interval contains 0.

    Args:
        differences: The differences, one for each seed.
    """
    if len(differences) < FEWEST:
        return ("not run", "one run", "two runs")[len(differences)]
    found = interval(differences)
    if found.low > 0:
        return "met"
    return "contrary" if found.high < 0 else "undecided"
