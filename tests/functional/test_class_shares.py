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


def test_doubtful_shares_are_corrected_by_what_the_model_predicts() -> None:
    logits = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64).log()  # a mean of 0.7 and 0.3
    odds = math.sqrt(0.7 * 0.2 / (0.3 * 0.8))
    expected = [odds / (1 + odds), 1 / (1 + odds)]
    assert doubted_shares(logits, (0.2, 0.8), 0.5).tolist() == pytest.approx(expected)
    assert doubted_shares(logits, (0.2, 0.8), 1.0).tolist() == pytest.approx([0.2, 0.8])
    assert doubted_shares(logits, (0.2, 0.8), 0.0).tolist() == pytest.approx([0.7, 0.3])


def test_it_is_the_same_in_sixteen_bits_and_nothing_without_samples() -> None:
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    small = shift_to_shares(logits.bfloat16(), HALVES)
    assert small.dtype == torch.float32
    torch.testing.assert_close(small, shift_to_shares(logits, HALVES))
    assert torch.equal(shift_to_shares(logits[:0], HALVES), torch.zeros(2))
