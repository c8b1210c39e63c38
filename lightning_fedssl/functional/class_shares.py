"""Probabilities whose mean over a site's samples is what the site states of its classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedssl.functional.pseudo_labels import at_least_float32

STEPS = 20
"""Steps of Sinkhorn's iteration, after which it has converged for all practical purposes."""


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
    shift = torch.zeros_like(logits[:0].sum(0), dtype=torch.float64)
    if not len(logits):
        return shift.to(logits.dtype)
    target = shares.to(shift).log()
    for _ in range(STEPS):
        shift = shift + target - _log_mean(logits.double() + shift)
        shift = shift - shift.mean()
    return shift.to(logits.dtype)


def doubted_shares(logits: Tensor, shares: Sequence[float], sureness: float) -> Tensor:
    """Shares that are not exact, corrected by what a model predicts: ``shares^f q^(1 - f)``, scaled
    to a sum of 1.

    q are the mean probabilities, and f is the sureness: a weighted mean of two estimates of the
    logarithms.

    Args:
        logits: Of all samples of a site, ``(n, classes)``.
        shares: What it states, all above 0, of sum 1.
        sureness: f, from 0 to 1.

    Returns:
        ``(classes,)``.
    """
    at_uniform = at_least_float32(logits).double()
    stated = at_uniform.new_tensor(shares).log()
    if sureness < 1:
        stated = sureness * stated + (1 - sureness) * _log_mean(at_uniform)
    return torch.softmax(stated, dim=0).to(at_least_float32(logits).dtype)


def _log_mean(logits: Tensor) -> Tensor:
    """Logarithms of the mean probabilities, ``(classes,)``."""
    return torch.logsumexp(torch.log_softmax(logits, dim=-1), dim=0) - math.log(len(logits))
