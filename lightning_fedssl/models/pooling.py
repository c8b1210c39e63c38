"""Max pooling over 2 x 2 pixels, bitwise as torch's and several times as fast where no gradient is needed on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def max_pool(x: Tensor) -> Tensor:
    """``F.max_pool2d(x, 2)``.

    torch's CPU kernel compares one number at a time, and takes as long as a convolution of a small network. Labelling,
    statistics and evaluation need no gradient: there, larger numbers of neighbours are taken for whole rows.

    Args:
        x: ``(batch, channels, height, width)``.

    Returns:
        ``(batch, channels, height // 2, width // 2)``.
    """
    if torch.is_grad_enabled() or x.device.type != "cpu" or not x.is_contiguous():
        return F.max_pool2d(x, 2)
    height, width = (size // 2 * 2 for size in x.shape[-2:])
    pairs = torch.maximum(x[..., :height, 0:width:2], x[..., :height, 1:width:2])
    return torch.maximum(pairs[..., ::2, :], pairs[..., 1::2, :])


class MaxPool2d(nn.MaxPool2d):
    """:func:`max_pool` as a layer."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:
        """The largest of each 2 x 2 pixels, ``(batch, channels, height // 2, width // 2)``."""
        return max_pool(input)
