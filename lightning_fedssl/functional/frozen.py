"""Frozen layers: tensors of a network that nothing changes during a run.

A frozen weight gets no gradient. A frozen batch norm normalises with the statistics that it has, in training and in
evaluation. Each layer stores which of its tensors are frozen, so copies of a network (a teacher) and parts of one
(split learning) have the same frozen tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.tied import all_tensors, tied_names

_MARK = "frozen_tensors"


def select_names(
    names: Iterable[str], patterns: Sequence[str], key: str, tied: Sequence[Sequence[str]] = ()
) -> list[str]:
    """The names that patterns select.

    A pattern is the name of a tensor (``convs.0.weight``), or of a layer, which stands for all its tensors
    (``convs.0``, ``convs``); ``*`` stands for any characters. A pattern that begins with ``!`` removes names from the
    selection. Later patterns have precedence. A pattern that matches one name of a tied tensor stands for all of them.

    Args:
        names: Names of tensors.
        patterns: The patterns, in order.
        key: The configuration key of the patterns, for messages.
        tied: The names of each tensor that has several; none by default.

    Raises:
        ValueError: A pattern matches no name.
    """
    everyone, selected = list(names), set[str]()
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        found = {n for n in everyone if fnmatchcase(n, wanted) or fnmatchcase(n, f"{wanted}.*")}
        if not found:
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in everyone))
            raise ValueError(f"{key}: {pattern!r} matches no tensor of the network, which has the layers {layers}")
        found.update(name for group in tied if not found.isdisjoint(group) for name in group)
        selected = selected - found if pattern.startswith("!") else selected | found
    return [name for name in everyone if name in selected]


def freeze(network: nn.Module, patterns: Sequence[str], key: str = "freeze") -> None:
    """Freeze a network's weights whose names the patterns select, in place.

    A batch norm whose weights are all frozen is replaced by a :class:`FrozenBatchNorm`. Dropout in frozen layers stays
    active.

    Args:
        network: The network.
        patterns: See :func:`select_names`.
        key: The configuration key of the patterns, for messages.

    Raises:
        ValueError: A pattern matches no name, or no weight would be left to train.
    """
    weights = dict(network.named_parameters())
    chosen = set(select_names(all_tensors(network), patterns, key, tied_names(network)))
    if chosen and not weights.keys() - chosen:
        raise ValueError(f"{key}: {', '.join(patterns)} selects every weight of the network, so nothing is trained")
    for path, layer in list(network.named_modules()):
        prefix = f"{path}." if path else ""
        own = [name for name, _ in layer.named_parameters(recurse=False) if f"{prefix}{name}" in chosen]
        for name in own:
            layer.get_parameter(name).requires_grad_(False)
        if isinstance(layer, _BatchNorm) and _is_frozen(layer, prefix, chosen):
            parent, _, child = path.rpartition(".")
            network.get_submodule(parent).add_module(child, FrozenBatchNorm(layer))
        elif own:
            setattr(layer, _MARK, tuple(own))


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Names of the frozen weights and buffers of a module, those in copies of a frozen network included.

    A tied weight has its first name, as in ``named_parameters``.
    """
    marked = {
        f"{path}.{name}".lstrip(".") for path, layer in module.named_modules() for name in vars(layer).get(_MARK, ())
    }
    return frozenset(name for name in _tensors(module) if name in marked)


def tensors_that_change(module: nn.Module) -> State:
    """A module's weights and buffers by name without the frozen ones, not copied."""
    frozen = frozen_names(module)
    return {name: tensor for name, tensor in _tensors(module).items() if name not in frozen}


def _tensors(module: nn.Module) -> State:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class FrozenBatchNorm(nn.Module):
    """A batch norm with fixed weights and fixed statistics: the same affine map in training and in evaluation.

    Its tensors have the names of the layer that it replaces.

    Args:
        layer: The batch norm, whose tensors it takes over.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        for name, weight in layer.named_parameters():
            weight.requires_grad_(False)
            self.register_parameter(name, weight)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, buffer)
        setattr(self, _MARK, (*self._parameters, *self._buffers))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, of its shape ``(batch, channels, ...)``."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, training=False, eps=self.eps)


def _is_frozen(layer: _BatchNorm, prefix: str, chosen: set[str]) -> bool:
    """Whether all weights of a batch norm (or, without weights, its statistics) are chosen, and it has statistics."""
    names = [name for name, _ in layer.named_parameters()] or [name for name, _ in layer.named_buffers()]
    return layer.running_mean is not None and bool(names) and all(f"{prefix}{name}" in chosen for name in names)
