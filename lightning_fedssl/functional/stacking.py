"""The tensors of several states, such as those of clients, as one tensor each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def stack_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several states, ``(states, ...)`` each.

    Kernels with the channels last stay so.
    """
    return {name: _stack([state[name] for state in states]) for name in states[0]}


def shapes_of(state: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size], ...]:
    """The shapes by which states can be stacked."""
    return tuple((name, t.shape) for name, t in state.items())


def stack_by_shape(
    states: Sequence[Mapping[str, Tensor]], before: Sequence[Mapping[str, Tensor]] = ()
) -> list[tuple[list[int], dict[str, Tensor]]]:
    """The indices of the states of each shape, and these states stacked.

    Args:
        states: Tensors by name.
        before: Stacked states that nobody needs any more. Those of a shape that is made are
            overwritten: on a CPU large tensors in new memory take several times as long.
    """
    by_shape: dict[object, list[int]] = {}
    for index, state in enumerate(states):
        by_shape.setdefault(shapes_of(state), []).append(index)
    memory: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor]
    memory = {(name, t.shape, t.dtype): t for old in before for name, t in old.items()}
    parts = []
    for rows in by_shape.values():
        part = {}
        for name, t in states[rows[0]].items():
            into = memory.pop((name, (len(rows), *t.shape), t.dtype), None)
            part[name] = _stack([states[row][name] for row in rows], into)
        parts.append((rows, part))
    return parts


def _stack(tensors: list[Tensor], into: Tensor | None = None) -> Tensor:
    if tensors[0].is_contiguous() or tensors[0].dim() != 4:
        return torch.stack(tensors, out=into)
    return torch.stack([t.permute(0, 2, 3, 1) for t in tensors]).permute(0, 1, 4, 2, 3)
