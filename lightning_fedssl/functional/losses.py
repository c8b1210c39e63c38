"""Losses shared by several methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.functional.pseudo_labels import PseudoLabels


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum of one or several losses."""
    return reduce(torch.add, terms)


def masked_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean of the losses with a true mask; 0 without one.

    Args:
        losses: ``(batch, ...)``.
        mask: Bool or weights, in their shape.
    """
    weights = mask.to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def consistency_losses(logits: Tensor, pseudo: PseudoLabels) -> Tensor:
    """The cross-entropy of each confident image, and 0 for each other image: ``(batch,)``.

    Args:
        logits: ``(batch, classes)`` of the view that is trained (the strong one).
        pseudo: Labels ``(batch,)`` and mask ``(batch,)`` of the other view (the weak one).
    """
    return F.cross_entropy(logits, pseudo.labels, reduction="none") * pseudo.mask


def consistency_loss(logits: Tensor, pseudo: PseudoLabels) -> Tensor:
    """Sum of the confident images' cross-entropies, divided by the batch size (FixMatch Eq. 4;
    FedRGD Eq. 4).

    Args:
        logits: ``(batch, classes)`` of the view that is trained (the strong one).
        pseudo: Labels ``(batch,)`` and mask ``(batch,)`` of the other view (the weak one).
    """
    return consistency_losses(logits, pseudo).mean()


def proximal_term(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    """Half the squared distance to the anchors, ``1/2 ||w - w_t||^2`` (FedProx, Li et al., MLSys
    2020, Eq. 2).
    """
    distances = [(w - anchor).square().sum() for w, anchor in zip(parameters, anchors, strict=True)]
    return 0.5 * sum(distances[1:], start=distances[0])


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each image against probabilities: ``(batch,)``.

    Args:
        logits: ``(batch, classes)``, or of pixels ``(batch, classes, height, width)``.
        target: In the shape of the logits.
    """
    return -(target * F.log_softmax(logits, dim=1)).sum(dim=1)


def kl_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL divergence of the predicted probabilities from target probabilities, ``KL(target ||
    softmax)``: ``(batch,)``.

    Args:
        logits: ``(batch, classes)``, or of pixels ``(batch, classes, height, width)``.
        target: In the shape of the logits.
    """
    return soft_cross_entropy(logits, target) + torch.xlogy(target, target).sum(dim=1)


def kl_to_uniform(logits: Tensor) -> Tensor:
    """KL divergence of each image's class probabilities from the uniform distribution, ``log C -
    H``: ``(batch,)``.

    As a loss it is a confidence penalty (Pereyra et al., 2017; Fed-SHVR Eq. 9).

    Args:
        logits: ``(batch, classes)``.
    """
    log_p = F.log_softmax(logits, dim=-1)
    return (log_p.exp() * log_p).sum(dim=-1) + math.log(logits.shape[-1])


def kl_from_uniform(logits: Tensor) -> Tensor:
    """KL divergence of the uniform distribution from each image's class probabilities:
    ``(batch,)``.

    As a loss it is label smoothing (Pereyra et al., 2017, section 3.2). It grows without bound as
    the probability of a class approaches 0, whereas :func:`kl_to_uniform` is at most ``log C``.

    Args:
        logits: ``(batch, classes)``.
    """
    return -F.log_softmax(logits, dim=-1).mean(dim=-1) - math.log(logits.shape[-1])
