"""Pseudo-labels from a model's logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class PseudoLabels(NamedTuple):
    """Labels that a model predicted for unlabelled images.

    Attributes:
        labels: ``(n,)`` int64, the most probable class; soft labels are probabilities ``(n,
            classes)``. Of several labels of an image, or of pixels, ``(n, ...)``.
        confidence: ``(n,)``, the probability of that class; ``(n, ...)`` likewise.
        mask: Bool in the shape of the confidence, whether it is at least the threshold.
    """

    labels: Tensor
    confidence: Tensor
    mask: Tensor


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert 16-bit logits to float32: near 0.95, the resolution of a bfloat16 confidence is only
    0.004.

    Autocast converts them for a single client, but not inside ``vmap``, which decomposes softmax
    and cross-entropy.
    """
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def pseudo_label(logits: Tensor, threshold: float, *, soft: bool = False) -> PseudoLabels:
    """The class with the largest softmax probability, confident if that probability is at least
    ``threshold``.

    Args:
        logits: ``(n, classes)``, or of pixels ``(n, classes, height, width)``.
        threshold: tau; the test is inclusive (SemiFL Eq. 3, FixMatch Eq. 4).
        soft: Return the probabilities instead of the class (SemiFL Eq. 2 as printed).
    """
    probabilities = torch.softmax(at_least_float32(logits), dim=1)
    confidence, labels = probabilities.max(dim=1)
    return PseudoLabels(probabilities if soft else labels, confidence, confidence >= threshold)


def agreement(labels: Tensor, helpers: Tensor) -> Tensor:
    """The class that a model and its helpers predict most often; in a tie, the lowest class
    (FedMatch Eq. 3).

    Args:
        labels: The model's own classes, ``(n,)`` int64.
        helpers: The helpers' probabilities, ``(n, helpers, classes)``.

    Returns:
        ``(n,)`` int64.
    """
    votes = torch.nn.functional.one_hot(labels, helpers.shape[-1])
    votes = votes + torch.nn.functional.one_hot(helpers.argmax(dim=-1), helpers.shape[-1]).sum(
        dim=1
    )
    return votes.argmax(dim=-1)


def skew_of(logits: Tensor) -> Tensor:
    """KL divergence of the images' mean class probabilities from the uniform distribution, in nats.

    For a correct model it is 0 if all classes are equally frequent, and ``log C`` if all images are
    of one class.

    Args:
        logits: ``(n, classes)``.
    """
    p = torch.softmax(logits.double(), dim=-1).mean(dim=0)
    return math.log(logits.shape[-1]) + torch.xlogy(p, p).sum()


def sharpen(logits: Tensor, alpha_0: float, alpha_1: float) -> Tensor:
    """The minimiser over v of ``alpha_0 CE(f, v) + alpha_1 KL(v || uniform)``, f the softmax of the
    logits.

    ``v_j = f_j^(alpha_0 / alpha_1) / sum_i f_i^(alpha_0 / alpha_1)``, one-hot for ``alpha_1 = 0``
    (Fed-SHVR, Lemma 1).

    Args:
        logits: ``(n, classes)``.
        alpha_0: Weight of the cross-entropy; 0 gives the uniform distribution, unless ``alpha_1``
            is also 0.
        alpha_1: Weight of the regulariser.

    Returns:
        Probabilities ``(n, classes)``.
    """
    if alpha_1 == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits * (alpha_0 / alpha_1), dim=-1)
