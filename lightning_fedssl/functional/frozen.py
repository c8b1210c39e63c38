"""Frozen layers: tensors of a network that nothing changes during a run.

A frozen weight gets no gradient. A frozen batch norm normalises with the statistics that it has, in
training and in evaluation. Each layer stores which of its tensors are frozen, so copies of a
network (a teacher) and parts of one (split learning) have the same frozen tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.tied import first_names, tensors_of

_MARK = "frozen_tensors"


def select_names(names: Mapping[str, str], patterns: Sequence[str], key: str) -> set[str]:
    """The first names of the tensors that patterns select.

    A pattern is the name of a tensor (``convs.0.weight``), or of a layer, which stands for all its
    tensors (``convs.0``, ``convs``); ``*`` stands for any characters. A pattern that begins with
    ``!`` removes names from the selection. Later patterns have precedence.

    Args:
        names: All names of tensors, each with the first name of its tensor
            (:func:`~lightning_fedssl.functional.tied.first_names`).
        patterns: The patterns, in order.
        key: The configuration key of the patterns, for messages.

    Raises:
        ValueError: A pattern matches no name.
    """
    selected = set[str]()
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        found = {
            f for n, f in names.items() if fnmatchcase(n, wanted) or fnmatchcase(n, f"{wanted}.*")
        }
        if not found:
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
            raise ValueError(
                f"{key}: {pattern!r} matches no tensor of the network, which has the layers "
                f"{layers}"
            )
        selected = selected - found if pattern.startswith("!") else selected | found
    return selected


def freeze(network: nn.Module, patterns: Sequence[str], key: str = "freeze") -> None:
    """Freeze a network's weights whose names the patterns select, in place.

    Weights that the network itself does not train (``requires_grad`` is False), such as those under
    adapters, are frozen, too. A batch norm whose weights are all frozen is replaced by a
    :class:`FrozenBatchNorm`. Dropout in frozen layers stays active.

    Args:
        network: The network.
        patterns: See :func:`select_names`.
        key: The configuration key of the patterns, for messages.

    Raises:
        ValueError: A pattern matches no name, or no weight would be left to train.
    """
    first = first_names(network)
    chosen = select_names(first, patterns, key)
    if chosen and not dict(network.named_parameters()).keys() - chosen:
        raise ValueError(
            f"{key}: {', '.join(patterns)} selects every weight of the network, so nothing is "
            "trained"
        )
    for path, layer in list(network.named_modules()):
        prefix = f"{path}." if path else ""
        weights = dict(layer.named_parameters(recurse=False))
        own = [
            name
            for name, w in weights.items()
            if first[f"{prefix}{name}"] in chosen or not w.requires_grad
        ]
        for name in own:
            weights[name].requires_grad_(False)
        tensors = [*weights] or [*dict(layer.named_buffers(recurse=False))]
        everything = bool(tensors) and all(first[f"{prefix}{name}"] in chosen for name in tensors)
        if everything and isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            parent, _, child = path.rpartition(".")
            network.get_submodule(parent).add_module(child, FrozenBatchNorm(layer))
        elif own:
            setattr(layer, _MARK, tuple(own))


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Names of the frozen weights and buffers of a module, those in copies of a frozen network
    included.

    A tied weight has its first name, as in ``named_parameters``.
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
    return {name: tensor for name, tensor in tensors_of(module).items() if name not in frozen}


class FrozenBatchNorm(nn.Module):
    """A batch norm with fixed weights and fixed statistics: the same affine map in training and in
    evaluation.

    Its tensors have the names of the layer that it replaces.

    Args:
        layer: The batch norm, whose tensors it takes over.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, buffer)
        setattr(
            self,
            _MARK,
            tuple(name for name, _ in (*layer.named_parameters(), *layer.named_buffers())),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, of its shape ``(batch, channels, ...)``."""
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=False,
            eps=self.eps,
        )
