"""Exponential moving averages of weights, as teachers use them."""

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
    """Update a teacher in place to ``decay * teacher + (1 - decay) * student``.

    Args:
        teacher: Tensors by name; they share no storage with the student's. Integer tensors (counters) are copied.
        student: Tensors with at least the same names, of the same shapes.
        decay: From 0, which makes the teacher bitwise equal to the student, to below 1.
        when: Whether to update at all. ``decay`` and ``when`` may be tensors without dimensions: in a step that is
            recorded as a CUDA graph, their values are known on the device only.
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
    """``min(1 - 1 / (step + 1), decay)``: in early steps the plain average of all values so far, later ``decay``.

    Args:
        step: The number of the update, from 1; 0 gives decay 0. For a tensor without dimensions, the result is a
            float64 tensor without dimensions.
        decay: gamma, the largest decay.
    """
    if isinstance(step, Tensor):
        return (1 - 1 / (step.double() + 1)).clamp(max=decay)
    return min(1 - 1 / (step + 1), decay)
