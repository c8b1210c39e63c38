"""Default optimizers, and a check for methods whose equations hold for plain SGD alone.

The defaults are functions and not lambdas: of a lambda jsonargparse may keep the arguments where a
configuration names SGD with other arguments, or take the default of the base class instead, and it
cannot write it into a configuration. They are in a module of their own because jsonargparse parses
the source of a default's module several times for each configuration that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """The default optimizer: SGD with learning rate 0.03 and momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.03, momentum=0.9)


def plain_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Fed-SHVR's default optimizer: SGD with learning rate 0.01 without momentum (Eq. 16)."""
    return torch.optim.SGD(parameters, lr=0.01)


def slow_plain_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """FedMatch's default optimizer: SGD with learning rate 0.001 without momentum."""
    return torch.optim.SGD(parameters, lr=1e-3)


def nesterov_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Semi-SFL's default optimizer: SGD with learning rate 0.02, Nesterov momentum 0.9 and weight
    decay 5e-4.
    """
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)


def require_plain_sgd(
    factory: OptimizerCallable, reason: str, weight_decay: bool = False, several_rates: bool = False
) -> None:
    """Refuse every optimizer but SGD without momentum.

    Args:
        factory: ``model.optimizer``.
        reason: Why the method needs plain SGD, and the alternative, for the message.
        weight_decay: Whether a weight decay is allowed.
        several_rates: Whether groups of weights may have learning rates of their own.

    Raises:
        ValueError: If it is another optimizer.
    """
    # A matrix and a vector, because the factory may make groups by shape.
    optimizer = factory([torch.zeros(1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)])
    groups = optimizer.param_groups
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or (group["weight_decay"] and not weight_decay) for group in groups
    )
    if not plain or (len({float(group["lr"]) for group in groups}) > 1 and not several_rates):
        extras = ("" if weight_decay else ", weight decay") + (
            "" if several_rates else " and rates of single weights"
        )
        raise ValueError(
            f"model.optimizer is {type(optimizer).__name__}, but {reason}: use SGD without "
            f"momentum{extras}"
        )
