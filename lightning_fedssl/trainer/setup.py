"""What is made ready before a command runs."""

from __future__ import annotations

from torch.optim import Optimizer


def prefer_fused(optimizer: Optimizer) -> Optimizer:
    """Use the optimizer's fused kernel where it has one and the user chose nothing."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and group.get("foreach") is None and not group.get("differentiable"):
            group["fused"] = True
    return optimizer
