"""Exponential moving averages of weights, as teachers use them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def ema_update(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], decay: float) -> None:
    """Update a teacher in place to ``decay * teacher + (1 - decay) * student``.

    Args:
        teacher: Tensors by name; they share no storage with the student's. Integer tensors
            (counters) are copied.
        student: Tensors with at least the same names, of the same shapes.
        decay: From 0, which makes the teacher bitwise equal to the student, to below 1.
    """
    for name, tensor in teacher.items():
        averaged = decay and tensor.is_floating_point()
        # Written out, because vmap has no lerp_.
        tensor.copy_(decay * tensor + (1 - decay) * student[name] if averaged else student[name])


def warm_decay(step: int, decay: float) -> float:
    """``min(1 - 1 / (step + 1), decay)``: in early steps the plain average of all values so far,
    later ``decay``.

    Args:
        step: The number of the update, from 1; 0 gives decay 0.
        decay: gamma, the largest decay.
    """
    return min(1 - 1 / (step + 1), decay)
