"""Splits a network in two at a layer: the clients have the bottom, the server has the top (split
learning).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.models.network import InShape, Layers


@runtime_checkable
class Chained(Protocol):
    """A network whose forward pass is a sequence of layers, but not simply that of its children."""

    def chain(self) -> Layers:
        """The layers by name, in the order in which they are applied.

        Their composition equals the network.
        """


class SplitNetwork(nn.Module):
    """A network in two parts; applying the bottom and then the top equals applying the whole
    network.

    Args:
        bottom: Maps an image to features.
        top: Maps features to logits.
        whole: The network that was split; it shares its layers with the two parts.
    """

    whole: nn.Module

    def __init__(self, bottom: nn.Module, top: nn.Module, whole: nn.Module) -> None:
        super().__init__()
        self.bottom = bottom
        self.top = top
        # Module.__setattr__ would register each weight under a second name.
        vars(self)["whole"] = whole

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, height, width)``."""
        logits: Tensor = self.top(self.bottom(x))
        return logits


def split(network: nn.Module, at: int | str, in_shape: InShape) -> SplitNetwork:
    """Split a network after a layer; the parts contain the network's own layers, not copies.

    Args:
        network: A sequence of layers: an ``nn.Sequential``, a network with a method ``chain``, or a
            module whose children are applied in the order in which they are registered, with a
            flattening before the first linear layer.
        at: The split index: the number of layers with weights (convolutions, linear layers,
            residual pairs) in the bottom. The norms, activations and poolings that follow such a
            layer belong to the same part; dropout and flattening before the next layer belong to
            the top. Or the name of the last layer of the bottom, such as ``features.4``.
        in_shape: Shape of one image, ``(channels, height, width)``, to check that the parts compute
            the same as the network.

    Raises:
        ValueError: There is no such split (the message lists the possible ones), or the network is
            not a sequence of layers.
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
            f"model.split is {at!r}, but {type(network).__name__} can be split at: "
            f"{listed or 'no layer'}. Give one of these numbers, or the name of the bottom's "
            "last layer"
        )
    parts = SplitNetwork(_sequence(layers[:end]), _sequence(layers[end:]), network)
    _refuse_shared_weights(parts)
    return parts


def _refuse_shared_weights(parts: SplitNetwork) -> None:
    """Refuse a weight that clients and server would both train, each a copy of its own."""
    names = {id(tensor): name for name, tensor in parts.bottom.named_parameters()}
    for name, tensor in parts.top.named_parameters():
        if id(tensor) in names:
            raise ValueError(
                f"model.split: {names[id(tensor)]} at the clients and {name} at the server are "
                "one weight of the network; split it elsewhere, or give each layer a weight of "
                "its own"
            )


def layers_of(network: nn.Module, in_shape: InShape) -> Layers:
    """The layers whose composition equals the network.

    Args:
        network: See :func:`split`; a network on the meta device is not checked.
        in_shape: Shape of one image, ``(channels, height, width)``.

    Raises:
        ValueError: The network is not a sequence of layers.
    """
    layers = _listed(network)
    weight = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    if weight.is_meta:
        return layers  # a meta tensor has no values to compare
    images = torch.linspace(-1, 1, 2 * math.prod(in_shape)).reshape(2, *in_shape).to(weight)
    try:
        with evaluating(network):
            same = torch.equal(_sequence(layers)(images), network(images))
        same = same and _same_in_training(network, images)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        same = False
    if not same:
        raise ValueError(
            f"model.network: {type(network).__name__} is no sequence of layers and cannot be "
            "split. Networks that can: AlexNet, CNN, MLP, ResNet9, SVHNCNN, VGG11, VGG16, an "
            "nn.Sequential, or one with a method chain() that lists its layers"
        )
    return layers


def _listed(network: nn.Module) -> Layers:
    """The layers that the network names, or its children in order."""
    return network.chain() if isinstance(network, Chained) else _flattened(list(_leaves(network)))


def _same_in_training(network: nn.Module, images: Tensor) -> bool:
    """Whether the layers equal the network in training, too, with other weights.

    Dropout outside of the layers has no effect in an evaluation, and a factor of 0 or 1 none with
    its first value.
    """
    outputs = []
    for whole in (True, False):
        trained = copy.deepcopy(network).train()  # of its own: a pass may change buffers
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for parameter in trained.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            outputs.append((trained if whole else _sequence(_listed(trained)).train())(images))
    return torch.equal(*outputs)


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module in order.

    An ``nn.Sequential`` among them is replaced by its own children.

    A layer that is registered twice is applied twice.
    """
    for name, child in module.named_modules(remove_duplicate=False):
        if not name or "." in name:
            continue
        path = f"{prefix}{name}"
        if isinstance(child, nn.Sequential):
            yield from _leaves(child, f"{path}.")
        else:
            yield path, child


def _flattened(layers: Layers) -> Layers:
    """The layers with an added flattening before the first linear layer, where networks usually
    flatten.
    """
    place = 0  # after the last layer that is neither dropout nor linear
    for number, (_, layer) in enumerate(layers):
        if isinstance(layer, nn.Flatten):
            return layers
        if isinstance(layer, nn.Linear):
            return [*layers[:place], ("flatten", nn.Flatten()), *layers[place:]]
        if not isinstance(layer, nn.Dropout):
            place = number + 1
    return layers


def _ends(layers: Layers) -> dict[int, int]:
    """The number of layers in the bottom, by split index.

    The top always has a layer with weights.
    """
    ends: dict[int, int] = {}
    end = 0  # of the bottom, if the next layer with weights is the first of the top
    for place, (_, layer) in enumerate(layers):
        if max(map(Tensor.dim, layer.parameters()), default=0) > 1:
            ends[len(ends)] = end or place
            end = 0
        elif isinstance(layer, (nn.Flatten, nn.Dropout)):
            end = end or place
    ends.pop(0, None)  # before the first layer with weights
    return ends


def _sequence(layers: Layers) -> nn.Sequential:
    """The layers as an ``nn.Sequential``.

    Dots in names become underscores, because torch forbids dots.
    """
    sequence = nn.Sequential()
    for name, layer in layers:
        sequence.add_module(name.replace(".", "_"), layer)
    return sequence
