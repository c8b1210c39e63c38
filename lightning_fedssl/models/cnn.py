"""A small convolutional network for laptops, the digits and quick experiments."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

from torch import nn

from lightning_fedssl.models.layers import (
    DEFAULT_GROUPS,
    NormKind,
    norm_layers,
)
from lightning_fedssl.models.network import (
    GlobalAverage,
    InShape,
    LayeredNetwork,
    Layers,
    MaxPool2d,
)


class CNN(LayeredNetwork):
    """3x3 convolutions of ``width``, ``2 width`` and then ``4 width`` channels, each with norm and
    ReLU; then linear.

    A 2x2 max-pool follows each convolution but the last, which global average pooling follows.
    Images must have at least 4 x 4 pixels for three convolutions. No paper uses this network: it is
    the smallest one that works with every method here. Initialisation is PyTorch's default.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        width: Channels of the first convolution.
        norm: The normalisation layer after each convolution. With ``none`` the convolutions have
            biases instead.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        depth: Number of convolutions; null: three, and one more for each doubling of the image's
            side above 32 pixels.

    Example:
        >>> import torch
        >>> CNN(num_classes=10, in_shape=(1, 8, 8), width=4)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        width: int = 32,
        norm: NormKind = "group",
        norm_groups: int = DEFAULT_GROUPS,
        depth: int | None = 3,
    ) -> None:
        super().__init__()
        depth = 3 + max(0, ceil(log2(max(in_shape[1:]) / 32))) if depth is None else depth
        channels = (in_shape[0], *[width, 2 * width][:depth], *[4 * width] * (depth - 2))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=norm == "none") for a, b in pairwise(channels)
        )
        self.norms = nn.ModuleList(map(norm_layers(norm, norm_groups), channels[1:]))
        self.pool = MaxPool2d()
        self.relu = nn.ReLU()
        self.average = GlobalAverage()
        self.classifier = nn.Linear(channels[-1], num_classes)

    def chain(self) -> Layers:
        """The layers in the order in which they are applied."""
        layers: Layers = []
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if index:
                layers.append((f"pool_{index - 1}", self.pool))
            layers += [(f"convs.{index}", conv), (f"norms.{index}", norm)]
            layers.append((f"relu_{index}", self.relu))
        return [*layers, ("average", self.average), ("classifier", self.classifier)]
