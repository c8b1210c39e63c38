"""Pseudo-labels from a model's logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PseudoLabels(NamedTuple):
    """Labels a model gave to unlabelled images.

    Attributes:
        labels: ``(n,)`` int64, the most probable class (or ``(n, classes)`` probabilities where a method asks for
            soft ones).
        confidence: ``(n,)``, the probability of that class.
        mask: ``(n,)`` bool, whether the confidence reaches the threshold.
    """

    labels: Tensor
    confidence: Tensor
    mask: Tensor


def pseudo_label(logits: Tensor, threshold: float, *, soft: bool = False) -> PseudoLabels:
    """Labels by the largest softmax probability, confident where it is at least ``threshold``.

    Args:
        logits: ``(n, classes)``.
        threshold: tau; the test is inclusive (SemiFL Eq. 3, FixMatch Eq. 4).
        soft: Give the probabilities instead of the class (SemiFL Eq. 2 as printed).
    """
    probabilities = torch.softmax(logits, dim=-1)
    confidence, labels = probabilities.max(dim=-1)
    return PseudoLabels(probabilities if soft else labels, confidence, confidence >= threshold)
