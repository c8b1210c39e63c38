from __future__ import annotations

import math

import pytest
import torch

from lightning_fedssl.functional.class_shares import doubted_shares, shift_to_shares

HALVES = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_the_mean_of_the_shifted_probabilities_is_the_shares() -> None:
    # Odds of 4 and 1.5 times a factor r: their probabilities sum to 1 where 4 r * 1.5 r = 1.
    logits = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64).log()
    shift = shift_to_shares(logits, HALVES)
    assert float(shift[0] - shift[1]) == pytest.approx(-math.log(6) / 2, abs=1e-6)
    torch.testing.assert_close((logits + shift).softmax(1).mean(0), HALVES)
    assert float(shift.sum()) == pytest.approx(0, abs=1e-9)
    many = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    found = (many + shift_to_shares(many, shares)).softmax(1).mean(0)
    torch.testing.assert_close(found, shares, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("stated", "weights"), [(0.6, (0.5, 0.5)), (0.2, (0.8726, 0.7921)), (0.7, (0.5, 0.5))])
def test_doubtful_shares_are_corrected_by_what_the_model_predicts(stated: float, weights: tuple[float, float]) -> None:
    """The more the two differ, the less by it: with a sureness of one half 1 - 0.2 / log(0.2 / 0.7)^2 = 0.8726."""
    logits = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64).log()  # a mean of 0.7 and 0.3
    powers = [s**w * q ** (1 - w) for s, q, w in zip((stated, 1 - stated), (0.7, 0.3), weights, strict=True)]
    found = doubted_shares(logits, (stated, 1 - stated), 0.5)
    assert found.tolist() == pytest.approx([power / sum(powers) for power in powers], abs=1e-4)
    assert doubted_shares(logits, (stated, 1 - stated), 1.0).tolist() == pytest.approx([stated, 1 - stated])


def test_it_is_the_same_in_sixteen_bits_and_nothing_without_samples() -> None:
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    small = shift_to_shares(logits.bfloat16(), HALVES)
    assert small.dtype == torch.float32
    torch.testing.assert_close(small, shift_to_shares(logits, HALVES))
    assert torch.equal(shift_to_shares(logits[:0], HALVES), torch.zeros(2))
