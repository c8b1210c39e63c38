"""Paired differences with intervals; the quantiles of Student's t are those of printed tables: 4.303, 3.182."""

from __future__ import annotations

import pytest

from lightning_fedssl.comparison.verdicts import interval, verdict


@pytest.mark.parametrize(
    ("differences", "half_width"),
    [
        ([1.0, 2.0, 6.0], 6.573),  # deviation sqrt((4 + 1 + 9) / 2) = sqrt(7): 4.303 sqrt(7) / sqrt(3)
        ([2.0, 2.0, 4.0, 4.0], 1.837),  # deviation sqrt(4 / 3): 3.182 sqrt(4 / 3) / 2
    ],
)
def test_the_interval_of_differences_with_the_mean_3(differences: list[float], half_width: float) -> None:
    found = interval(differences)
    assert (found.mean, found.count) == (3.0, len(differences))
    assert [found.low, found.high] == pytest.approx([3 - half_width, 3 + half_width], abs=0.001)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([], "not run"),
        ([9.0], "one run"),
        ([9.0, 9.0], "two runs"),
        ([1.0, 2.0, 6.0], "undecided"),  # -3.6 to 9.6, though every seed is above 0
        ([2.0, 2.0, 4.0, 4.0], "met"),  # 1.2 to 4.8
        ([-2.0, -2.0, -4.0, -4.0], "contrary"),
        ([-1.0, -2.0, -6.0], "undecided"),
        ([0.0, 0.0, 0.0], "undecided"),
    ],
)
def test_what_may_be_said(differences: list[float], said: str) -> None:
    assert verdict(differences) == said
