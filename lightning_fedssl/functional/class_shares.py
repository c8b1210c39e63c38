"""Probabilities whose mean over a site's samples is what the site states of its classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedssl.functional.pseudo_labels import at_least_float32

STEPS = 20
"""Steps of Sinkhorn's iteration, after which it has converged for all practical purposes."""

MODEL_ERROR = 0.2
"""The mean square error of the logarithms of a model's mean probabilities: a factor of 1.6."""


def shift_to_shares(logits: Tensor, shares: Tensor) -> Tensor:
    """What is added to all logits of a site, so that its mean probabilities are its shares.

    The factors ``exp(shift)`` are found by Sinkhorn's iteration: each step multiplies them by the
    shares over the present mean. Of several samples it changes the least sure ones the most.

    Args:
        logits: Of all samples of a site, ``(n, classes)``.
        shares: How frequent each class is there, ``(classes,)``, all above 0, of sum 1.

    Returns:
        ``(classes,)``, of mean 0; zeros without samples.
    """
    logits = at_least_float32(logits)
    shift = logits.new_zeros(logits.shape[1], dtype=torch.float64)
    if not len(logits):
        return shift.to(logits.dtype)
    target = shares.to(shift).log()
    for _ in range(STEPS):
        shift = shift + target - _log_mean(logits.double() + shift)
        shift = shift - shift.mean()
    return shift.to(logits.dtype)


def doubted_shares(logits: Tensor, shares: Sequence[float], sureness: float) -> Tensor:
    """Shares that are not exact, corrected by what a model predicts: ``s^w q^(1 - w)`` for each
    class, scaled to a sum of 1.

    s is stated, q is the mean probability, and w is the sureness f, or more: if s is off by a
    factor whose logarithm has the variance ``e = MODEL_ERROR (1 - f) / f``, and s and q are further
    apart than that explains, then the model is wrong, and ``w = 1 - e / log(s / q)^2``. So it is
    where a class is rare and a model learnt from as many labels of each.

    Args:
        logits: Of all samples of a site, ``(n, classes)``.
        shares: What it states, all above 0, of sum 1.
        sureness: f, from above 0 to 1.

    Returns:
        ``(classes,)``.
    """
    predicted = _log_mean(logits.double())
    apart = predicted.new_tensor(shares).log() - predicted
    error = MODEL_ERROR * (1 - sureness) / sureness
    weight = (1 - error / (apart.square() + 1e-12)).clamp(min=sureness)
    return torch.softmax(predicted + weight * apart, dim=0).to(at_least_float32(logits).dtype)


def _log_mean(logits: Tensor) -> Tensor:
    """Logarithms of the mean probabilities, ``(classes,)``."""
    return torch.logsumexp(torch.log_softmax(logits, dim=-1), dim=0) - math.log(len(logits))
