"""What is made ready before a command runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer


def build_optimizer(factory: OptimizerCallable, weights: Sequence[Tensor], key: str) -> Optimizer:
    """The optimizer of clients or server.

    Args:
        factory: From the configuration.
        weights: What it trains.
        key: Its key, for messages: ``model.optimizer``.

    Raises:
        ValueError: If its settings are wrong, or it cannot make a step from one dense gradient.
    """
    try:
        optimizer = factory(weights)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{key}: {reason}; change {key}.init_args, or choose another optimizer") from error
    if not math.isfinite(optimizer.defaults.get("lr", 0)):
        raise ValueError(
            f"{key}: the learning rate is {optimizer.defaults['lr']}; give a finite number ({key}.init_args.lr)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.SparseAdam) or (closure and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{key} is {type(optimizer).__name__}, which needs sparse gradients or computes the loss several times in "
            "a step; choose one that makes a step from one gradient, such as SGD or Adam"
        )
    return prefer_fused(optimizer)


def prefer_fused(optimizer: Optimizer) -> Optimizer:
    """Use the optimizer's fused kernel where it has one and the user chose nothing."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and group.get("foreach") is None and not group.get("differentiable"):
            group["fused"] = True
    return optimizer
