"""Contrastive losses between images of one class, against reference keys of this batch and of earlier ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class References(NamedTuple):
    """What anchors are compared with.

    Attributes:
        keys: Projections of length 1, ``(references, dimension)``; they carry no gradient.
        labels: Their classes, ``(references,)``.
        confident: Whether a reference may be a positive, ``(references,)`` bool.
        valid: Whether it counts at all, ``(references,)`` bool: not an empty slot of a queue.
    """

    keys: Tensor
    labels: Tensor
    confident: Tensor
    valid: Tensor

    @classmethod
    def of(cls, keys: Tensor, labels: Tensor, confident: Tensor | None = None) -> References:
        """References that all count, and are all confident if nothing else is said."""
        everyone = torch.ones_like(labels, dtype=torch.bool)
        return cls(keys, labels, everyone if confident is None else confident, everyone)

    @classmethod
    def cat(cls, *parts: References) -> References:
        """All of them, in order."""
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def contrastive_loss(
    queries: Tensor, labels: Tensor, references: References, temperature: float, *, own_key: bool = True
) -> Tensor:
    """How far each anchor is from the references of its class: ``(anchors,)``.

    ``-mean_p [z . z_p / kappa - log sum_a exp(z . z_a / kappa)]`` over the positives p, the confident references of the
    anchor's label, and over all references a (Semi-SFL Eq. 3 and 5). An anchor without a positive has a loss of 0.

    Args:
        queries: z, projections of length 1, ``(anchors, dimension)``.
        labels: The anchors' classes, ``(anchors,)``.
        references: What they are compared with.
        temperature: kappa.
        own_key: If false, reference i is left out for anchor i, of which it is another view.
    """
    similarity = queries @ references.keys.t() / temperature
    counts = references.valid.expand_as(similarity)
    if not own_key:
        counts = counts & ~torch.eye(*similarity.shape, dtype=torch.bool, device=similarity.device)
    least = torch.finfo(similarity.dtype).min  # not minus infinity: a row of nothing else has a gradient of NaN
    log_shares = similarity.masked_fill(~counts, least).log_softmax(dim=1)
    positive = counts & references.confident & (labels[:, None] == references.labels)
    return -log_shares.where(positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
