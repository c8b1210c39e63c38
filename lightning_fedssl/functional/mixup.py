"""Mixup of images and of losses (Zhang et al., ICLR 2018), with the mixing ratios given by the caller."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def mixup(x: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    """``ratio * x + (1 - ratio) * other``, one ratio per image.

    Args:
        x: ``(batch, ...)``.
        other: Same shape as ``x``.
        ratio: lambda, ``(batch,)``.
    """
    ratio = ratio.reshape(-1, *[1] * (x.dim() - 1))
    return ratio * x + (1 - ratio) * other


def mixup_cross_entropy(logits: Tensor, target: Tensor, other_target: Tensor, ratio: Tensor) -> Tensor:
    """Batch mean of ``ratio * CE(logits, target) + (1 - ratio) * CE(logits, other_target)`` (SemiFL Eq. 5).

    Args:
        logits: ``(batch, classes)``.
        target: ``(batch,)`` classes or ``(batch, classes)`` probabilities.
        other_target: As ``target``, of the images mixed in.
        ratio: lambda, ``(batch,)``.
    """
    loss = F.cross_entropy(logits, target, reduction="none")
    other_loss = F.cross_entropy(logits, other_target, reduction="none")
    return (ratio * loss + (1 - ratio) * other_loss).mean()
