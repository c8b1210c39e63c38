"""Tied weights: one tensor that a module has under several names, such as the weight of two layers.

``named_parameters`` gives the first name alone, ``state_dict`` all of them. The server's state, and so a checkpoint,
has the first name; a module that loads a state by name expects all.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.func import functional_call

from lightning_fedssl.functional.averaging import State


def all_tensors(module: nn.Module) -> State:
    """A module's weights and buffers under all their names, not copied.

    Args:
        module: The module.
    """
    weights = module.named_parameters(remove_duplicate=False)
    return {**dict(weights), **dict(module.named_buffers(remove_duplicate=False))}


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tensor that has several.

    Args:
        module: The module.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in all_tensors(module).items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def complete(state: State, module: nn.Module, prefix: str = "") -> None:
    """Add to a state the names that it lacks of tensors that it has under another name, in place.

    Args:
        state: Tensors by name.
        module: The module whose tensors they are.
        prefix: What the names in the state begin with.
    """
    for group in tied_names(module):
        known = [prefix + name for name in group if prefix + name in state]
        for name in group if known else ():
            state.setdefault(prefix + name, state[known[0]])


def complete_when_loaded(module: nn.Module) -> None:
    """Let a module with tied weights load states that have them under one of their names.

    Args:
        module: The module; its ``load_state_dict`` and those of modules that contain it complete the state.
    """
    if tied_names(module):
        module.register_load_state_dict_pre_hook(_complete_loaded)


def _complete_loaded(module: nn.Module, state_dict: State, prefix: str, *_: Any) -> None:
    complete(state_dict, module, prefix)


def places_of(module: nn.Module) -> dict[str, str]:
    """Where a module's weights and buffers are: the name of every place, and the name of the tensor there.

    Layers may share a tensor, which then has several places. A layer with several names is visited once.

    Args:
        module: The module.
    """
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    return {
        f"{path}.{name}".lstrip("."): names[id(t)]
        for path, layer in module.named_modules()
        for name, t in (*layer._parameters.items(), *layer._buffers.items())
        if t is not None
    }


def call_with(module: nn.Module, tensors: State, *inputs: Any) -> Any:
    """A module's output with other weights and buffers.

    ``torch.func.functional_call`` ties weights by itself, but visits a layer under each of its names, and so leaves the
    given tensor in a layer that has several.

    Args:
        module: The module, unchanged afterwards.
        tensors: The other tensors, each by its first name; the module's own where left out.
        inputs: What the module takes.
    """
    given = {place: tensors[name] for place, name in places_of(module).items() if name in tensors}
    return functional_call(module, given, inputs, tie_weights=False)
