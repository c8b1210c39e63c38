"""A check for methods whose equations hold for plain SGD alone."""

from __future__ import annotations

import torch
from lightning.pytorch.cli import OptimizerCallable


def require_plain_sgd(factory: OptimizerCallable, reason: str, weight_decay: bool = False) -> None:
    """Refuse every optimizer but SGD without momentum.

    Args:
        factory: ``model.optimizer``.
        reason: Why the method needs plain SGD, and the alternative, for the message.
        weight_decay: Whether a weight decay is allowed.

    Raises:
        ValueError: If it is another optimizer.
    """
    try:
        optimizer = factory([torch.zeros(1, 1, requires_grad=True)])
    except Exception:
        return  # reported with its reason where the real optimizer is built
    name = type(optimizer).__name__
    settings = {"momentum": optimizer.param_groups[0].get("momentum", 0)}
    if not weight_decay:
        settings["weight_decay"] = optimizer.param_groups[0].get("weight_decay", 0)
    wrong = [f"{key} {value}" for key, value in settings.items() if value]
    if not isinstance(optimizer, torch.optim.SGD) or wrong:
        found = f"{name} with {' and '.join(wrong)}" if wrong else name
        remove = " and ".join(settings)
        raise ValueError(f"model.optimizer is {found}, but {reason}: use SGD without {remove}")
