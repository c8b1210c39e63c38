"""Fully connected networks."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from lightning_fedssl.models.network import InShape, LayeredNetwork, Layers


class MLP(LayeredNetwork):
    """Flatten, then linear layers with biases and ReLU between them.

    The default is the "2NN" of McMahan et al., "Communication-Efficient Learning of Deep Networks
    from Decentralized Data" (AISTATS 2017): 199,210 parameters on 28 x 28 grey images.
    ``hidden=(5000,)`` is Fed-SHVR's MNIST network (3,975,010).

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        hidden: Widths of the hidden layers, first to last; an empty tuple gives a linear
            classifier.

    Example:
        >>> import torch
        >>> MLP(num_classes=3, in_shape=(4,), hidden=[8])(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        hidden: tuple[int, ...] = (200, 200),
    ) -> None:
        super().__init__()
        widths = (math.prod(in_shape), *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.flatten = nn.Flatten()
        self.relu = nn.ReLU()
        self.classifier = nn.Linear(widths[-1], num_classes)

    def chain(self) -> Layers:
        """The layers in the order in which they are applied."""
        layers: Layers = [("flatten", self.flatten)]
        for index, layer in enumerate(self.hidden):
            layers += [(f"hidden.{index}", layer), (f"relu_{index}", self.relu)]
        return [*layers, ("classifier", self.classifier)]
