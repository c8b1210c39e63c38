"""Cutting a network in two at a layer: the bottom stays with the clients, the top with the server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.models.network import InShape

Layers = list[tuple[str, nn.Module]]
"""Layers by name, in the order in which they are applied."""


@runtime_checkable
class Chained(Protocol):
    """A network whose forward pass is not the plain sequence of its children, but which can say what it is."""

    def chain(self) -> Layers:
        """The layers that, one after another, are the network."""


class SplitNetwork(nn.Module):
    """A network in two parts, which together are the network.

    Args:
        bottom: From the image to the features.
        top: From the features to the logits.
        whole: The network that was cut; its layers are those of the parts.
    """

    whole: nn.Module

    def __init__(self, bottom: nn.Module, top: nn.Module, whole: nn.Module) -> None:
        super().__init__()
        self.bottom = bottom
        self.top = top
        vars(self)["whole"] = whole  # past Module.__setattr__: registered, its weights would have two names

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, height, width)``."""
        logits: Tensor = self.top(self.bottom(x))
        return logits


def split(network: nn.Module, at: int | str, in_shape: InShape) -> SplitNetwork:
    """Cut a network after a layer; the parts are the network's own layers, not copies.

    Args:
        network: One that is a sequence of layers: an ``nn.Sequential``, a module whose children are applied in the
            order in which they are registered, with a flattening before the first linear layer, or one with a method
            ``chain``.
        at: The split index: how many layers with weights (convolutions, linear layers) the bottom has, together with
            the norms, activations and poolings that follow them; dropout and flattening before the next layer belong to
            the top. Or the name of the bottom's very last layer, e.g. ``features.4``.
        in_shape: Shape of one image, to check that the parts do what the network does.

    Raises:
        ValueError: There is no such split, or the network is no sequence of layers; the message lists the splits.
    """
    layers = layers_of(network, in_shape)
    ends = _ends(layers)
    if isinstance(at, str) and not at.isdecimal():
        names = [name for name, _ in layers]
        end = names.index(at) + 1 if at in names else 0
    else:
        end = ends.get(int(at), 0)
    if not 0 < end <= max(ends.values(), default=0):
        listed = ", ".join(f"{index} ({layers[end - 1][0]})" for index, end in ends.items())
        raise ValueError(
            f"model.split is {at!r}, but {type(network).__name__} can be split at: {listed or 'no layer'}. Give one of "
            "these numbers, or the name of the bottom's last layer"
        )
    return SplitNetwork(_sequence(layers[:end]), _sequence(layers[end:]), network)


def layers_of(network: nn.Module, in_shape: InShape) -> Layers:
    """The layers that, one after another, do what the network does.

    Args:
        network: See :func:`split`; one on the meta device is taken at its word.
        in_shape: Shape of one image.

    Raises:
        ValueError: The network is no sequence of layers.
    """
    layers = network.chain() if isinstance(network, Chained) else _flattened(list(_leaves(network)))
    weight = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    if weight.is_meta:
        return layers  # there are no values to compare
    images = torch.linspace(-1, 1, 2 * in_shape[0] * in_shape[1] * in_shape[2]).reshape(2, *in_shape).to(weight)
    try:
        with evaluating(network):
            same = torch.equal(_sequence(layers)(images), network(images))
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        same = False
    if not same:
        raise ValueError(
            f"model.network: {type(network).__name__} is no sequence of layers and cannot be split. Networks that can: "
            "AlexNet, CNN, MLP, SVHNCNN, VGG11, VGG16, an nn.Sequential, or one with a method chain() that lists its "
            "layers"
        )
    return layers


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children in order; sequences are opened, and so is the network itself."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Sequential):
            yield from _leaves(child, f"{path}.")
        else:
            yield path, child


def _flattened(layers: Layers) -> Layers:
    """With the flattening that networks usually do in their forward pass: before the first linear layer."""
    first = next((i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)), None)
    if first is None or any(isinstance(layer, nn.Flatten) for _, layer in layers[:first]):
        return layers
    while first and isinstance(layers[first - 1][1], nn.Dropout):
        first -= 1
    return [*layers[:first], ("flatten", nn.Flatten()), *layers[first:]]


def _ends(layers: Layers) -> dict[int, int]:
    """For every split index the number of layers in the bottom; something with weights remains for the top."""
    heavy = [i for i, (_, layer) in enumerate(layers) if any(p.dim() > 1 for p in layer.parameters())]
    ends = {}
    for index, (this, following) in enumerate(pairwise(heavy), start=1):
        first_of_top = (i for i in range(this + 1, following) if isinstance(layers[i][1], (nn.Flatten, nn.Dropout)))
        ends[index] = next(first_of_top, following)
    return ends


def _sequence(layers: Layers) -> nn.Sequential:
    """The layers under names without dots, which modules may not have."""
    sequence = nn.Sequential()
    for name, layer in layers:
        sequence.add_module(name.replace(".", "_"), layer)
    return sequence
