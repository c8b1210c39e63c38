"""Sparse communication: thresholds on values and on changes, and the bytes of sending the remaining
entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedssl.functional.averaging import Sizes


def hard_threshold(values: Tensor, threshold: float) -> Tensor:
    """Set the values whose magnitude is at most ``threshold`` to 0.

    Args:
        values: Any shape.
        threshold: The largest magnitude that becomes 0.
    """
    return torch.where(values.abs() > threshold, values, torch.zeros_like(values))


def keep_changes(new: Tensor, old: Tensor, delta: float, threshold: float = 0.0) -> Tensor:
    """The new values where they differ from the old ones by more than ``delta``, else the old
    values.

    Args:
        new: Any shape.
        old: The same shape as ``new``.
        delta: The largest change that is ignored.
        threshold: For the comparison, new values of at most this magnitude count as 0.
    """
    return torch.where((hard_threshold(new, threshold) - old).abs() > delta, new, old)


def sparse_sizes(name: str, count: int, dense: Tensor) -> Sizes:
    """Bytes of sending some entries of a tensor: their values, and their positions as 32-bit
    numbers or a bit map.

    Args:
        name: The tensor's name.
        count: Number of entries that are sent; if all entries are sent, their positions are not.
        dense: The whole tensor.
    """
    if count == dense.numel():
        return {name: dense.nbytes}
    positions = min(4 * count, -(-dense.numel() // 8))
    return {name: count * dense.element_size(), f"{name}.positions": positions}
