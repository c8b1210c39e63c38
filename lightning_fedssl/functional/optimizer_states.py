"""States of optimizers as named tensors, optimizers like another, and their learning rates."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.optimizers import weights_of

_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool), "int": (int, torch.int64), "float": (float, torch.float64)
}  # fmt: skip
"""Python numbers in an optimizer's state: their types, and those of the tensors that hold them
exactly."""


def optimizer_state(optimizer: Optimizer) -> State:
    """The tensors of an optimizer's state, by the number of the parameter and their own name; they
    are not copied.

    A Python number, such as an own optimizer's count of steps, becomes a tensor, and its key ends
    with its type: ``0.step:int``. Other values are left out.
    """
    state = {}
    for i, p in enumerate(weights_of(optimizer)):
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                state[f"{i}.{name}"] = value
            elif (kind := type(value).__name__) in _NUMBERS:
                state[f"{i}.{name}:{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind][1])
    return state


def load_optimizer_state(optimizer: Optimizer, state: State) -> None:
    """Load what :func:`optimizer_state` returned, as copies on the parameters' devices.

    An empty state resets it.

    Momenta that are missing are 0 for fused SGD, which creates those of all weights at a step or of
    none.

    Raises:
        ValueError: A tensor has not the shape of its weight, and the kernel would not check it.
    """
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for key, value in state.items():
        number, name = key.split(".", 1)
        p, group = parameters[int(number)]
        full_name, _, kind = name.rpartition(":")
        if full_name and kind in _NUMBERS:
            optimizer.state[p][full_name] = _NUMBERS[kind][0](value.item())
            continue
        # Step counts stay on the CPU, except for kernels that read them on the device.
        on_device = value.dim() or group.get("fused") or group.get("capturable")
        if value.dim() and value.shape == p.shape:
            # Fused kernels read memory in order, so a state must have the memory layout of its
            # weight.
            optimizer.state[p][name] = torch.empty_like(p, dtype=value.dtype).copy_(
                value, non_blocking=True
            )
        elif value.dim() and group.get("fused"):  # whose kernels would read beyond its end
            raise ValueError(
                f"{key} of a stored optimizer state has not the shape of its weight; resume "
                "another checkpoint"
            )
        else:
            optimizer.state[p][name] = value.to(
                p.device if on_device else value.device, non_blocking=True, copy=True
            )
    if isinstance(optimizer, torch.optim.SGD):
        for p, group in parameters:
            if group["fused"] and group["momentum"] and not group["dampening"]:
                optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every parameter group's learning rate to ``factor`` times the configured one."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def like(template: Optimizer, tensors: Sequence[Tensor], state: State) -> Optimizer:
    """An optimizer of the same class and settings over other tensors, with a copy of a state."""
    remaining = iter(tensors)
    optimizer = _remade(template, lambda weights: list(islice(remaining, len(weights))))
    load_optimizer_state(optimizer, state)
    return optimizer


def part_of(template: Optimizer, ids: Container[int]) -> Optimizer:
    """An optimizer of the same class and settings over some of the weights, without a state.

    Args:
        template: The optimizer.
        ids: The ``id`` of each weight that remains.
    """
    return _remade(template, lambda weights: [p for p in weights if id(p) in ids])


def _remade(template: Optimizer, of_group: Callable[[list[Tensor]], list[Tensor]]) -> Optimizer:
    """An optimizer of the same class and settings, with other weights in each group."""
    groups = []
    for group in template.param_groups:
        if weights := of_group(group["params"]):
            groups.append({**group, "params": weights})
    kind: Any = type(template)
    return cast(Optimizer, kind(groups))
