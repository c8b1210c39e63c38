"""Exponential moving averages of weights: teachers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def ema_update(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], decay: float) -> None:
    """Move a teacher towards a student in place: ``decay * teacher + (1 - decay) * student``.

    Args:
        teacher: Tensors by name; they share no storage with the student's.
        student: At least the same names, of the same shapes.
        decay: From 0, which copies the student to the bit, to below 1. What is not floating (a counter) is copied.
    """
    for name, own in teacher.items():
        # not lerp_, for which vmap has no rule
        moves = decay and own.is_floating_point()
        own.copy_(decay * own + (1 - decay) * student[name] if moves else student[name])


def warm_decay(step: int, decay: float) -> float:
    """``min(1 - 1 / (step + 1), decay)``: the average of all values so far until ``decay`` remembers no longer.

    Args:
        step: The update's number, from 1; 0 copies.
        decay: gamma.
    """
    return min(1 - 1 / (step + 1), decay)
