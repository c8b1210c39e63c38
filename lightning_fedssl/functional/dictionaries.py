"""Dictionaries by name, such as a state dict: what Python has no function for.

Each function returns a new dictionary; the values are not copied unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

Key = TypeVar("Key")
Value = TypeVar("Value")
Result = TypeVar("Result")


def map_values(
    function: Callable[..., Result], values: Mapping[Key, Any], *others: Mapping[Key, Any]
) -> dict[Key, Result]:
    """Apply a function to each value, as ``map`` does to lists.

    Args:
        function: Takes a value, and one of each of ``others``.
        values: The values by name.
        others: Further values with at least the same names.
    """
    return {name: function(value, *(o[name] for o in others)) for name, value in values.items()}


def select(values: Mapping[Key, Value], names: Collection[object]) -> dict[Key, Value]:
    """Keep the values of these names, in the order of the values; others need not exist."""
    return {name: value for name, value in values.items() if name in names}


def exclude(values: Mapping[Key, Value], names: Collection[object]) -> dict[Key, Value]:
    """Leave out the values of these names."""
    return {name: value for name, value in values.items() if name not in names}


def starting_with(prefix: str | tuple[str, ...], values: Mapping[str, Value]) -> dict[str, Value]:
    """Keep the values whose names start with a prefix, or with one of several."""
    return {name: value for name, value in values.items() if name.startswith(prefix)}


def add_prefix(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Put a prefix before each name."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def remove_prefix(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Remove a prefix from the names that have it; keep the others."""
    return {name.removeprefix(prefix): value for name, value in values.items()}


def clone_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into storage of their own, without gradients."""
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
    buffers = map_values(Tensor.clone, dict(module.named_buffers()))
    return functional_call(module, {**weights, **buffers}, inputs)
