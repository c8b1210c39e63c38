"""Exponential moving averages of weights: teachers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import torch
from torch import Tensor


@torch.no_grad()
def ema_update(
    teacher: Mapping[str, Tensor],
    student: Mapping[str, Tensor],
    decay: float | Tensor,
    when: bool | Tensor = True,
) -> None:
    """Move a teacher towards a student in place: ``decay * teacher + (1 - decay) * student``.

    Args:
        teacher: Tensors by name; they share no storage with the student's.
        student: At least the same names, of the same shapes.
        decay: From 0, which copies the student bit by bit, to below 1. What is not floating (a counter) is copied.
        when: Whether the teacher moves at all. Both may be tensors without dimensions, where a step is recorded as a
            CUDA graph and the host does not know them.
    """
    for name, own in teacher.items():
        # not lerp_, for which vmap has no rule
        new = _moved(own, student[name], decay) if own.is_floating_point() else student[name]
        if isinstance(when, Tensor):
            new = torch.where(when, new, own)
        if when is not False:
            own.copy_(new)


def _moved(own: Tensor, student: Tensor, decay: float | Tensor) -> Tensor:
    if isinstance(decay, Tensor):
        return torch.where(decay == 0, student, (decay * own + (1 - decay) * student).to(own.dtype))
    return decay * own + (1 - decay) * student if decay else student


@overload
def warm_decay(step: int, decay: float) -> float: ...


@overload
def warm_decay(step: Tensor, decay: float) -> Tensor: ...


def warm_decay(step: int | Tensor, decay: float) -> float | Tensor:
    """``min(1 - 1 / (step + 1), decay)``: the average of all values so far until ``decay`` remembers no longer.

    Args:
        step: The update's number, from 1; 0 copies. A tensor without dimensions gives one, in 64 bits.
        decay: gamma.
    """
    if isinstance(step, Tensor):
        return (1 - 1 / (step.double() + 1)).clamp(max=decay)
    return min(1 - 1 / (step + 1), decay)
