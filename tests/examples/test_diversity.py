from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from examples.diagnostics.gradient_diversity import GradientSum, merged, sum_gradients

ORTHOGONAL = sum_gradients(torch.eye(2))


@pytest.mark.parametrize(
    ("norm", "squared", "value"),
    [("l2", True, 1.0), ("l2", False, math.sqrt(2)), ("l1", True, 0.5), ("l1", False, 1.0)],
)
def test_two_orthogonal_gradients(norm: Any, squared: bool, value: float) -> None:
    """Squared L2: (1 + 1) / 2; L2: 2 / sqrt 2; squared L1: (1 + 1) / 2^2; L1: 2 / 2 (for unit vectors)."""
    assert ORTHOGONAL.diversity(norm, squared=squared) == pytest.approx(value)


def test_form_of_the_authors_code_is_n_times_as_large() -> None:
    assert ORTHOGONAL.diversity_of_means() == pytest.approx(2)
    assert ORTHOGONAL.diversity_of_means(squared=False) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("n", [1, 3, 10])
def test_equal_gradients(n: int) -> None:
    """n ||g||^2 / ||n g||^2 = 1 / n."""
    total = sum_gradients(torch.tensor([[3.0, -4.0]]).expand(n, 2))
    assert total.diversity() == pytest.approx(1 / n)
    assert total.diversity(squared=False) == pytest.approx(1)
    assert total.diversity_of_means() == pytest.approx(1)


def test_sums_of_parts_are_the_sum_of_all_and_the_parts_stay() -> None:
    g = torch.randn(7, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [sum_gradients(g[:3]), sum_gradients(g[3:]), GradientSum()]
    before = [None if p.total is None else p.total.clone() for p in parts]
    both = merged(parts)
    expected = g.square().sum() / g.sum(0).square().sum()
    assert both.diversity() == pytest.approx(float(expected))
    assert both.diversity("l1") == pytest.approx(float(g.abs().sum(1).square().sum() / g.sum(0).abs().sum() ** 2))
    for part, total in zip(parts, before, strict=True):
        assert (part.total is None) == (total is None)
        assert total is None or torch.equal(part.total, total)  # type: ignore[arg-type]


def test_cancelling_gradients_are_infinitely_diverse_and_none_is_an_error() -> None:
    assert sum_gradients(torch.tensor([[1.0], [-1.0]])).diversity() == math.inf
    with pytest.raises(ValueError, match="at least one gradient"):
        GradientSum().diversity()
