"""Frozen layers: tensors of a network that nothing changes during a run.

A frozen weight gets no gradient. A frozen batch norm normalises with the statistics that it has, in
training and in evaluation, and stays the module that it is: what else it computes (timm's batch
norms contain the activation) is kept. Each layer stores which of its tensors are frozen, so copies
of a network (a teacher) and parts of one (split learning) have the same frozen tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import exclude, tensors_of

_MARK = "frozen_tensors"


def select_names(names: Collection[str], patterns: Sequence[str], key: str) -> set[str]:
    """The names of the tensors that patterns select.

    A pattern is the name of a tensor (``convs.0.weight``), or of a layer, which stands for all its
    tensors (``convs.0``, ``convs``); ``*`` stands for any characters. A pattern that begins with
    ``!`` removes names from the selection. Later patterns have precedence.

    Args:
        names: All names of tensors.
        patterns: The patterns, in order.
        key: The configuration key of the patterns, for messages.

    Raises:
        ValueError: A pattern matches no name.
    """
    selected = set[str]()
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        matches = {n for n in names if fnmatchcase(n, glob) or fnmatchcase(n, f"{glob}.*")}
        if not matches:
            layers = [*dict.fromkeys(name.rpartition(".")[0] or name for name in names)]
            raise ValueError(
                f"{key}: {pattern!r} matches no tensor of the network, which has the layers "
                f"{listed(layers)}"
            )
        selected = selected - matches if pattern.startswith("!") else selected | matches
    return selected


def personal_names(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """What each client keeps for itself, ``network.NAME`` each; frozen tensors are everybody's.

    Args:
        network: The network.
        patterns: ``model.personal``; see :func:`select_names`.

    Raises:
        ValueError: A pattern matches no name, or no weight would be kept or left to share.
    """
    chosen = select_names(tensors_of(network), patterns, "model.personal") - frozen_names(network)
    listed_patterns = ", ".join(patterns)
    if listed_patterns and not chosen:
        raise ValueError(
            f"model.personal: {listed_patterns} keeps nothing: name a layer that is trained"
        )
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    if chosen and trained <= chosen:
        raise ValueError(f"model.personal: {listed_patterns} leaves no weight to share")
    return [f"network.{name}" for name in sorted(chosen)]


def listed(names: Sequence[str]) -> str:
    """Names in a message: of more than ten the first and the last five, and how many there are."""
    if len(names) <= 10:
        return ", ".join(names)
    return f"{', '.join(names[:5])}, ..., {', '.join(names[-5:])} ({len(names)} in all)"


def freeze(network: nn.Module, patterns: Sequence[str], key: str = "freeze") -> None:
    """Freeze a network's weights whose names the patterns select, in place.

    Weights that the network itself does not train (``requires_grad`` is False), such as those under
    adapters, are frozen, too. A layer with a ``running_mean`` (a batch norm, also a foreign one)
    whose weights are all frozen is in evaluation mode from then on, and its statistics are frozen
    as well. Dropout in frozen layers stays active. In evaluation, nothing changes.

    Args:
        network: The network.
        patterns: See :func:`select_names`.
        key: The configuration key of the patterns, for messages.

    Raises:
        ValueError: A pattern matches no name, or no weight would be left to train.
    """
    chosen = select_names(tensors_of(network), patterns, key)
    if chosen and not dict(network.named_parameters()).keys() - chosen:
        raise ValueError(
            f"{key}: {', '.join(patterns)} selects every weight of the network, so nothing is "
            "trained"
        )
    for path, layer in list(network.named_modules()):
        prefix = f"{path}." if path else ""
        weights = dict(layer.named_parameters(recurse=False))
        of_layer = []
        for name, weight in weights.items():
            if prefix + name in chosen or not weight.requires_grad:
                weight.requires_grad_(False)
                of_layer.append(name)
        buffers = dict(layer.named_buffers(recurse=False))
        everything = len(of_layer) == len(weights)
        if not weights:
            everything = all(prefix + name in chosen for name in buffers)
        if everything and getattr(layer, "running_mean", None) is not None:
            of_layer += buffers
            layer.register_forward_pre_hook(_evaluate)
        if of_layer:
            setattr(layer, _MARK, tuple(of_layer))


def _evaluate(layer: nn.Module, inputs: Any) -> None:
    """A hook before a layer's forward pass: the layer normalises with the statistics that it has.

    The layers inside it (a dropout) keep their mode.
    """
    layer.training = False


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Names of the frozen weights and buffers of a module, those in copies of a frozen network
    included.
    """
    marked = {
        f"{path}.{name}".lstrip(".")
        for path, layer in module.named_modules()
        for name in vars(layer).get(_MARK, ())
    }
    return frozenset(name for name in tensors_of(module) if name in marked)


def tensors_that_change(module: nn.Module) -> State:
    """A module's weights and buffers by name without the frozen ones, not copied."""
    frozen = frozen_names(module)
    return exclude(tensors_of(module), frozen)


def trained_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are trained, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
