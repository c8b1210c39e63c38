"""A small U-Net, for a class of every pixel."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.models.layers import DEFAULT_GROUPS, NormKind, conv_norm_relu, norm_layers
from lightning_fedssl.models.network import InShape, Network, max_pool


class UNet(Network):
    """Convolutions with max-pooling, then the way back up, joined with the maps of the same size.

    O. Ronneberger, P. Fischer, T. Brox, "U-Net: Convolutional Networks for Biomedical Image
    Segmentation", MICCAI 2015, arXiv 1505.04597; with padding, norms, nearest-neighbour enlargement
    and one convolution at each size going up. Images may have any size of at least
    ``2^(depth - 1)`` pixels.

    Args:
        num_classes: Outputs for each pixel; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        width: Channels at the full size; they double with each halving.
        depth: Number of sizes, the paper's is 5.
        norm: The normalisation layer after each convolution. With ``none`` the convolutions have
            biases instead.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_shape: InShape = (3, 64, 64),
        width: int = 16,
        depth: int = 3,
        norm: NormKind = "group",
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        layers = norm_layers(norm, norm_groups)
        block = partial(conv_norm_relu, norm=layers, bias=norm == "none")
        widths = [width * 2**size for size in range(depth)]
        ways = pairwise([in_shape[0], *widths])
        self.down = nn.ModuleList(nn.Sequential(block(a, b), block(b, b)) for a, b in ways)
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes, height, width)`` of images ``(batch, channels, height,
        width)``.
        """
        maps: list[Tensor] = []
        for index, down in enumerate(self.down):
            x = down(max_pool(x) if index else x)
            maps.append(x)
        for same_size, up in zip(maps[-2::-1], [*self.up][::-1], strict=True):
            larger = F.interpolate(x, size=same_size.shape[-2:], mode="nearest")
            x = up(torch.cat([same_size, larger], dim=1))
        logits: Tensor = self.classifier(x)
        return logits
