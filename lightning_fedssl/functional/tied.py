"""Tied weights: one tensor that a module has under several names, such as the weight of two layers.

``named_parameters`` gives the first name alone, and so do the server's state and a checkpoint;
``state_dict`` gives all of them, and a module that loads a state by name expects all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.by_name import mapped


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


def places_of(module: nn.Module) -> dict[str, str]:
    """One name of each place in each layer, with the first name of the tensor there.

    ``functional_call`` would exchange the tensors of a layer with two names twice, and leave the
    given ones in it.

    Args:
        module: The module.
    """
    layers = dict(module.named_modules())  # each layer once
    return {
        name: first
        for name, first in first_names(module).items()
        if name.rpartition(".")[0] in layers
    }


def call_with(module: nn.Module, tensors: State, *inputs: Any) -> Any:
    """A module's output with other weights and buffers, which leaves the module as it was.

    Args:
        module: The module.
        tensors: The other tensors, each by its first name; the module's own where left out.
        inputs: What the module takes.
    """
    given = {place: tensors[name] for place, name in places_of(module).items() if name in tensors}
    return functional_call(module, given, inputs, tie_weights=False)


def call_apart(module: nn.Module, weights: State, *inputs: Any) -> Any:
    """As :func:`call_with` other weights; what the pass does to buffers is not kept.

    Args:
        module: The module.
        weights: The other weights, each by its first name.
        inputs: What the module takes.
    """
    buffers = mapped(Tensor.clone, dict(module.named_buffers()))
    return call_with(module, {**weights, **buffers}, *inputs)


def complete_when_loaded(module: nn.Module) -> None:
    """Let a module with tied weights load states that have them under their first names alone.

    Args:
        module: The module; its ``load_state_dict`` and those of modules that contain it complete
            the state.
    """
    if any(name != first for name, first in first_names(module).items()):
        module.register_load_state_dict_pre_hook(_complete)


def _complete(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    for name, first in first_names(module).items():
        if prefix + first in state:
            state.setdefault(prefix + name, state[prefix + first])
