"""Splits a network in two at a layer: the clients have the bottom, the server has the top (split
learning).
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fedssl.models.network import (
    LayeredNetwork,
    Layers,
    applies_in_order,
    layers_inside,
)


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


def split(network: nn.Module, at: int | str) -> SplitNetwork:
    """Split a network after a layer; the parts contain the network's own layers, not copies.

    Args:
        network: A sequence of layers: an ``nn.Sequential``, or a
            :class:`~lightning_fedssl.models.network.LayeredNetwork`, without a forward pass of
            its own.
        at: The split index: the number of layers with weights (convolutions, linear layers,
            residual pairs) in the bottom. The norms, activations and poolings that follow such a
            layer belong to the same part; dropout and flattening before the next layer belong to
            the top. Or the name of the last layer of the bottom, such as ``features.4``.

    Raises:
        ValueError: There is no such split (the message lists the possible ones), or the network is
            not a sequence of layers.
    """
    layers = _layers_of(network)
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
    return SplitNetwork(_sequence(layers[:end]), _sequence(layers[end:]), network)


def _layers_of(network: nn.Module) -> Layers:
    """The layers whose composition is the network."""
    if applies_in_order(network):
        return list(layers_inside(network))
    if isinstance(network, LayeredNetwork) and type(network).forward is LayeredNetwork.forward:
        return network.chain()
    raise ValueError(
        f"model.network: {type(network).__name__} is not a sequence of layers, so it cannot be "
        "split. Networks that can: AlexNet, CNN, MLP, ResNet9, SVHNCNN, VGG11, VGG16, an "
        "nn.Sequential, or a lightning_fedssl.models.network.LayeredNetwork whose chain() lists "
        "its layers by name; none with a forward of its own"
    )


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
