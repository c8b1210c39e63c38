"""Tied weights: one tensor that a module has under several names, such as the weight of two layers.

``named_parameters`` gives the first name alone, and so do the server's state and a checkpoint; ``state_dict`` gives all
of them, and a module that loads a state by name expects all.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_fedssl.functional.averaging import State


def tensors_of(module: nn.Module) -> State:
    """A module's weights and buffers by their first names, not copied."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def first_names(module: nn.Module) -> dict[str, str]:
    """All names of a module's weights and buffers, each with the first name of its tensor.

    Args:
        module: The module.
    """
    first: dict[int, str] = {}
    weights = module.named_parameters(remove_duplicate=False)
    tensors = [*weights, *module.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def complete_when_loaded(module: nn.Module) -> None:
    """Let a module with tied weights load states that have them under their first names alone.

    Args:
        module: The module; its ``load_state_dict`` and those of modules that contain it complete the state.
    """
    if any(name != first for name, first in first_names(module).items()):
        module.register_load_state_dict_pre_hook(_complete)


def _complete(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    for name, first in first_names(module).items():
        if prefix + first in state:
            state.setdefault(prefix + name, state[prefix + first])
