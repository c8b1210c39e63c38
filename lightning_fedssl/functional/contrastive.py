"""Supervised contrastive losses: the references are keys of the current batch and of earlier
batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class References(NamedTuple):
    """The references of a contrastive loss, with which its anchors are compared.

    Attributes:
        keys: Projections of length 1, ``(references, dimension)``, without gradient.
        labels: Classes of the references, ``(references,)``.
        confident: Whether a reference may be a positive, ``(references,)`` bool.
        valid: Whether a reference is used at all, ``(references,)`` bool; False for an empty slot
            of a queue.
    """

    keys: Tensor
    labels: Tensor
    confident: Tensor
    valid: Tensor

    @classmethod
    def all_valid(cls, keys: Tensor, labels: Tensor, confident: Tensor | None = None) -> References:
        """References that are all valid; by default, all are confident."""
        all_true = torch.ones_like(labels, dtype=torch.bool)
        return cls(keys, labels, all_true if confident is None else confident, all_true)

    @classmethod
    def cat(cls, *parts: References) -> References:
        """The concatenation of several references, in order."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


def contrastive_loss(
    queries: Tensor,
    labels: Tensor,
    references: References,
    temperature: float,
    *,
    own_key: bool = True,
) -> Tensor:
    """The supervised contrastive loss of each anchor: ``(anchors,)``.

    ``-mean_p [z . z_p / kappa - log sum_a exp(z . z_a / kappa)]`` (Semi-SFL Eq. 3 and 5). The
    positives p are the confident references with the anchor's label; a runs over all valid
    references. An anchor without a positive has a loss of 0.

    Args:
        queries: z, projections of length 1, ``(anchors, dimension)``.
        labels: The anchors' classes, ``(anchors,)``.
        references: The references that the anchors are compared with.
        temperature: kappa.
        own_key: Whether reference i, another view of anchor i, is a reference for anchor i.
    """
    similarity = queries @ references.keys.t() / temperature
    counts = references.valid.expand_as(similarity)
    if not own_key:
        counts = counts & ~torch.eye(*similarity.shape, dtype=torch.bool, device=similarity.device)
    # Not minus infinity: a row of minus infinities has a gradient of NaN.
    lowest = torch.finfo(similarity.dtype).min
    log_shares = similarity.masked_fill(~counts, lowest).log_softmax(dim=1)
    positive = counts & references.confident & (labels[:, None] == references.labels)
    return -log_shares.where(positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
