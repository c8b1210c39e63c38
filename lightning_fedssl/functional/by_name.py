"""Dictionaries by name, such as the tensors of a model: what Python has no function for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

Key = TypeVar("Key")
Value = TypeVar("Value")
Result = TypeVar("Result")


def mapped(function: Callable[[Value], Result], values: Mapping[Key, Value]) -> dict[Key, Result]:
    """What a function makes of each value."""
    return {name: function(value) for name, value in values.items()}


def paired(
    function: Callable[[Value, Value], Result],
    values: Mapping[Key, Value],
    others: Mapping[Key, Value],
) -> dict[Key, Result]:
    """What a function makes of each value and the one of the same name in others."""
    return {name: function(value, others[name]) for name, value in values.items()}


def only(values: Mapping[Key, Value], names: Collection[Key]) -> dict[Key, Value]:
    """Those of these names, in the order of the values."""
    return {name: value for name, value in values.items() if name in names}


def without(values: Mapping[Key, Value], names: Collection[Key]) -> dict[Key, Value]:
    """All but those of these names."""
    return {name: value for name, value in values.items() if name not in names}


def taken(values: Mapping[Key, Value], names: Iterable[Key]) -> dict[Key, Value]:
    """Those of these names that there are, in the order of the names."""
    return {name: values[name] for name in names if name in values}


def prefixed(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """All, with a prefix before each name."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def below(prefix: str | tuple[str, ...], values: Mapping[str, Value]) -> dict[str, Value]:
    """Those whose names begin with a prefix, or with one of several."""
    return {name: value for name, value in values.items() if name.startswith(prefix)}


def unprefixed(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """All, without a prefix before the names that have it."""
    return {name.removeprefix(prefix): value for name, value in values.items()}


def stacked(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several states, ``(states, ...)`` each.

    Kernels with the channels last stay so.
    """
    return {name: _stack([state[name] for state in states]) for name in states[0]}


def shapes_of(state: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size], ...]:
    """The shapes by which states can be stacked."""
    return tuple((name, t.shape) for name, t in state.items())


def stacked_by_shape(
    states: Sequence[Mapping[str, Tensor]], before: Sequence[Mapping[str, Tensor]] = ()
) -> list[tuple[list[int], dict[str, Tensor]]]:
    """The places of the states of each shape, and these states stacked.

    Args:
        states: Tensors by name.
        before: Stacked states that nobody needs any more. Those of a shape that is made are
            overwritten: on a CPU large tensors in new memory take several times as long.
    """
    by_shape: dict[object, list[int]] = {}
    for place, state in enumerate(states):
        by_shape.setdefault(shapes_of(state), []).append(place)
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


def renamed(function: Callable[[str], str], values: Mapping[str, Value]) -> dict[str, Value]:
    """All, each under what a function makes of its name."""
    return {function(name): value for name, value in values.items()}


def places(keys: Iterable[Key]) -> dict[Key, int]:
    """The place of each, from 0."""
    return {key: place for place, key in enumerate(keys)}


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors, which share no storage and no gradient with them."""
    return {name: t.detach().clone() for name, t in state.items()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's weights and buffers, not copied."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def first_number(tensors: Iterable[Tensor]) -> Tensor:
    """The first floating-point tensor, whose type and device a model has; an empty one if there is
    none.
    """
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def call_with_weights(module: nn.Module, weights: Mapping[str, Tensor], *inputs: Any) -> Any:
    """A module's output with other weights; what the pass does to buffers is not kept.

    Args:
        module: The module.
        weights: The other weights; the module's own where left out.
        inputs: What the module takes.
    """
    buffers = mapped(Tensor.clone, dict(module.named_buffers()))
    return functional_call(module, {**weights, **buffers}, inputs)
