"""Losses shared by several methods."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import functional as F


def masked_cross_entropy(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy averaged over the images whose mask is set; 0 if none is.

    Args:
        logits: ``(batch, classes)``.
        target: ``(batch,)`` classes or ``(batch, classes)`` probabilities.
        mask: ``(batch,)`` bool or weights.
    """
    losses = F.cross_entropy(logits, target, reduction="none")
    weights = mask.to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def proximal_term(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    """Half the squared distance to the anchors, ``1/2 ||w - w_t||^2`` (FedProx, Li et al., MLSys 2020, Eq. 2)."""
    distances = [(w - anchor).square().sum() for w, anchor in zip(parameters, anchors, strict=True)]
    return 0.5 * sum(distances[1:], start=distances[0])
