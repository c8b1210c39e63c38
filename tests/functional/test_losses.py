import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.functional.losses import masked_mean, proximal_term


def test_a_masked_mean_averages_over_the_kept() -> None:
    logits, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    mask = torch.tensor([True, False, True, False])
    losses = F.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(masked_mean(losses, mask), F.cross_entropy(logits[mask], y[mask]))
    assert masked_mean(losses, torch.zeros(4, dtype=torch.bool)).item() == 0


def test_proximal_term_by_hand() -> None:
    """Half of 1^2 + 2^2 + (3 - 1)^2; the gradient is the difference to the anchor."""
    weights = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    anchors = [torch.tensor([0.0, 0.0]), torch.tensor([1.0])]
    term = proximal_term(weights, anchors)
    assert term.item() == pytest.approx(0.5 * (1 + 4 + 4))
    (gradient,) = torch.autograd.grad(term, weights[:1])
    assert torch.equal(gradient, torch.tensor([1.0, 2.0]))
