"""Which entries of a tensor matter: thresholds on values and on changes, and what sending those alone costs."""

from __future__ import annotations

import torch
from torch import Tensor


def hard_threshold(values: Tensor, threshold: float) -> Tensor:
    """The values, with those of at most ``threshold`` in size at 0.

    Args:
        values: Any shape.
        threshold: An entry of exactly this size becomes 0.
    """
    return torch.where(values.abs() > threshold, values, torch.zeros_like(values))


def keep_changes(new: Tensor, old: Tensor, delta: float, threshold: float = 0.0) -> Tensor:
    """The new values where they differ enough from the old ones, which stay elsewhere.

    Args:
        new: Any shape.
        old: The same shape.
        delta: A change of exactly this size is dropped.
        threshold: New values up to this size are compared as 0.
    """
    return torch.where((hard_threshold(new, threshold) - old).abs() > delta, new, old)


def sparse_sizes(name: str, count: int, dense: Tensor) -> dict[str, int]:
    """Bytes of some entries of a tensor: their values, and their positions as numbers of 32 bit or as a bit map.

    Args:
        name: The tensor's name.
        count: Entries that are sent; if that is all, positions are needless.
        dense: The whole tensor.
    """
    if count == dense.numel():
        return {name: dense.nbytes}
    positions = min(4 * count, -(-dense.numel() // 8))
    return {name: count * dense.element_size(), f"{name}.positions": positions}
