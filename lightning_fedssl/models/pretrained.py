"""Initial weights from a file: what ``model.init_from`` reads, and how its tensors are matched with
the network's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fedssl.functional.averaging import State, is_finite
from lightning_fedssl.functional.dictionaries import (
    add_prefix,
    exclude,
    remove_prefix,
    select,
    starting_with,
    tensors_of,
)
from lightning_fedssl.functional.frozen import listed, select_names
from lightning_fedssl.models.network import Network

_CONTAINERS = ("state_dict", "model_state_dict", "model", "network")
"""Entries under which programs store the weights in a file, first match first."""

_PREFIXES = ("module.", "_orig_mod.", "network.", "model.")
"""Prefixes that wrappers add to every name: DistributedDataParallel, ``torch.compile``,
LightningModules."""

_PEFT = "base_model.model."
_OF_PEFT = r"\.base_layer(?=\.)|\.original_module(?=\.)|\.modules_to_save\.\w+(?=\.)"
"""What peft puts into the names of a network's tensors."""

_COUNTER = "num_batches_tracked"
"""A batch norm's counter, which some norm layers have and others do not; no result depends on it.
"""


def load_weights(network: nn.Module, path: str | Path, left_out: Sequence[str] = ()) -> None:
    """Set a network's weights and buffers to those of a file, in place.

    Args:
        network: The network.
        path: ``model.safetensors`` of a run, any other safetensors file, a checkpoint of a run or
            of Lightning, or what ``torch.save`` wrote of a ``state_dict``. Names as torchvision and
            timm write them are translated where the network offers that
            (:meth:`~lightning_fedssl.models.network.Network.own_name`). A network with adapters of
            peft also takes the weights of the network without them; the adapters then keep their
            initial weights.
        left_out: Patterns (:func:`~lightning_fedssl.functional.frozen.select_names`) of tensors
            that are not loaded: the network's stay as they are, whether or not the file has them.

    Raises:
        ValueError: The file does not exist, cannot be read or has no weights, or its tensors are
            not those of the network; the message names some.
    """
    expected = tensors_of(network)
    weights = read_weights(Path(path).expanduser())
    if isinstance(network, Network):
        weights = {network.own_name(name): t for name, t in weights.items()}
    expected, weights = _without_adapters(expected, weights)
    weights = _with_prefix(weights, expected)
    names = {**weights, **expected}
    ignored = select_names(names, left_out, "model.init_except")
    ignored |= {name for name in names if name.endswith(_COUNTER)}
    expected = exclude(expected, ignored)
    weights = exclude(weights, ignored)
    if mismatch := _mismatch(expected, weights):
        raise ValueError(
            f"model.init_from: {path} does not fit {type(network).__name__}: "
            f"{'; '.join(mismatch)}. Choose the network that the file was written for, or list "
            "the tensors that may differ in model.init_except, for example [classifier]"
        )
    if not is_finite(filter(Tensor.is_floating_point, weights.values())):
        raise ValueError(
            f"model.init_from: {path} has weights that are not finite numbers; give another file"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])


def read_weights(path: Path, key: str = "model.init_from") -> State:
    """The tensors of a file by name, without what wrappers put before the names.

    Args:
        path: See :func:`load_weights`.
        key: The key of the configuration that a message names.

    Raises:
        ValueError: The file does not exist, cannot be read, or has no weights.
    """
    if not path.is_file():
        raise ValueError(
            f"{key}: there is no file {path.absolute()}; give the path of a file with weights, "
            "or null where a checkpoint brings the weights"
        )
    tensors = _tensors_of(_content(path, key))
    if not tensors:
        raise ValueError(
            f"{key}: {path} holds no tensors by name; save weights by "
            "torch.save(network.state_dict(), path)"
        )
    return _without_prefixes(tensors)


def _content(path: Path, key: str) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of a foreign file cause
        raise ValueError(
            f"{key}: {path} cannot be read as a file of weights: it is damaged or of another "
            "kind, or holds more than tensors; save the weights alone by "
            "torch.save(network.state_dict(), path)"
        ) from error


def _tensors_of(content: Any) -> State:
    """The tensors of a file's content, or of the first of its entries that is a mapping with
    tensors.
    """
    if not isinstance(content, Mapping):
        return {}
    for name in _CONTAINERS:
        if isinstance(content.get(name), Mapping) and (inside := _tensors_of(content[name])):
            return inside
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _without_prefixes(state: State) -> State:
    """The weights of the network: of a checkpoint of this package without a teacher's, and without
    common prefixes.
    """
    network = starting_with("network.", state)
    if len(network) + len(starting_with("teacher.", state)) + len(
        starting_with("head.", state)
    ) == len(state):
        state = network or state
    for prefix in _PREFIXES:
        if len(starting_with(prefix, state)) == len(state):
            state = remove_prefix(prefix, state)
    return state


def _with_prefix(weights: State, expected: State) -> State:
    """A file's tensors under the prefix of a network that stands in an attribute (``net.``)."""
    prefix = next(iter(expected), "").partition(".")[0] + "."
    named = add_prefix(prefix, weights)
    return (
        named
        if named.keys() & expected.keys() and not weights.keys() & expected.keys()
        else weights
    )


def _without_adapters(expected: State, weights: State) -> tuple[State, State]:
    """A network's tensors without peft's adapters, and those of a file under the network's names.

    Args:
        expected: The network's tensors.
        weights: Those of the file; if it has peft's names, too, both are returned unchanged.
    """
    if _PEFT not in " ".join(expected) or _PEFT in " ".join(weights):
        return expected, weights
    adapted = tuple(name.partition("base_layer.")[0] for name in expected if ".base_layer." in name)
    names = {}
    for name in expected:
        if ".base_layer." in name or not name.startswith(adapted):
            names[name] = re.sub(_OF_PEFT, "", name.partition(_PEFT)[2])
    renamed = {name: weights[old] for name, old in names.items() if old in weights}
    return select(expected, names), renamed | exclude(weights, names.values())


def _mismatch(expected: State, weights: State) -> list[str]:
    """One phrase for each kind of difference, with the tensors that differ."""
    shapes = []
    for name, tensor in select(expected, weights).items():
        wrong = tuple(weights[name].shape)
        if wrong != tuple(tensor.shape):
            shapes.append(f"{name} is {wrong} instead of {tuple(tensor.shape)}")
    kinds = {
        "missing in the file": [*exclude(expected, weights)],
        "unknown to the network": [*exclude(weights, expected)],
        "of another shape": shapes,
    }
    return [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
