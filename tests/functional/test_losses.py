import math

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.functional.losses import consistency_loss, masked_cross_entropy, proximal_term
from lightning_fedssl.functional.pseudo_labels import PseudoLabels


def test_masked_cross_entropy_averages_over_the_kept() -> None:
    logits, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    mask = torch.tensor([True, False, True, False])
    torch.testing.assert_close(masked_cross_entropy(logits, y, mask), F.cross_entropy(logits[mask], y[mask]))
    assert masked_cross_entropy(logits, y, torch.zeros(4, dtype=torch.bool)).item() == 0


def test_proximal_term_by_hand() -> None:
    """Half of 1^2 + 2^2 + (3 - 1)^2; the gradient is the difference to the anchor."""
    weights = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    anchors = [torch.tensor([0.0, 0.0]), torch.tensor([1.0])]
    term = proximal_term(weights, anchors)
    assert term.item() == pytest.approx(0.5 * (1 + 4 + 4))
    (gradient,) = torch.autograd.grad(term, weights[:1])
    assert torch.equal(gradient, torch.tensor([1.0, 2.0]))


def pseudo(kept: int, count: int) -> PseudoLabels:
    mask = torch.arange(count) < kept
    return PseudoLabels(torch.zeros(count, dtype=torch.int64), mask.float(), mask)


def test_consistency_loss_is_a_mean_over_the_whole_batch() -> None:
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = consistency_loss(logits, pseudo(0, 64))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    two = torch.tensor([[-math.log(math.exp(2) - 1), 0.0]]).expand(64, 2)
    assert F.cross_entropy(two, torch.zeros(64, dtype=torch.int64)).item() == pytest.approx(2, abs=1e-6)
    assert consistency_loss(two, pseudo(16, 64)).item() == pytest.approx(0.5, abs=1e-6)
