"""Clipping of the gradient's norm with little Python overhead.

``torch.nn.utils.clip_grad_norm_`` first sorts the gradients by device and type, which takes longer than its kernels for
a small network. The gradients of one party have one device and, as a rule, one type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_norm(weights: Sequence[Tensor], most: float) -> None:
    """Scale the gradients in place so that their L2 norm is at most ``most``; bitwise as torch's own function.

    Args:
        weights: On one device; those without a gradient are left out.
        most: The largest norm.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if len({gradient.dtype for gradient in gradients}) != 1:
        torch.nn.utils.clip_grad_norm_(weights, most, foreach=True)
        return
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)
