"""Changes of gradients between the backward pass and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def add_to_gradients(corrected: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to each weight's gradient; a weight that the loss did not reach has a gradient of 0.

    Args:
        corrected: Pairs of a weight and what is added.
    """
    for weight, value in corrected:
        if weight.grad is None:
            # Fused kernels need the weight's memory layout.
            weight.grad = torch.empty_like(weight).copy_(value)
        else:
            weight.grad.add_(value)


def clip_gradients(leaves: Iterable[Tensor], max_norm: float) -> None:
    """Scale each client's gradient down to a norm over all its weights, as ``clip_grad_norm_`` does
    for one client.

    Args:
        leaves: The weights, ``(clients, ...)`` each, with gradients.
        max_norm: Largest L2 norm of a client's gradient.
    """
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not gradients:
        return
    norms = torch.linalg.vector_norm(
        torch.cat([g.reshape(len(g), -1) for g in gradients], 1), dim=1
    )
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.reshape(-1, *[1] * (gradient.dim() - 1)))
