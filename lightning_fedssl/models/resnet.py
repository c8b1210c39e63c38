"""ResNet-8, ResNet-9 and ResNet-18 with the stems for small images, as SAGE, FedRGD and FedMatch
train them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.models.layers import (
    DEFAULT_GROUPS,
    NormKind,
    NormLayers,
    conv_norm_relu,
    draw_by_fan_out,
    norm_layers,
)
from lightning_fedssl.models.network import InShape, LayeredNetwork, Layers, MaxPool2d, Network


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions with norms, plus a shortcut: the identity, or a 1x1 convolution where
    the shape changes.
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, make_norm: NormLayers
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = make_norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = make_norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), make_norm(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        total: Tensor = out + self.shortcut(x)
        return total.relu()


class _ResNet(Network):
    """A 3x3 stem without pooling, stages of basic blocks, and the mean over positions before the
    classifier.

    Attributes:
        strides: Of the first block of each stage.
        blocks_per_stage: Number of blocks of each stage.
    """

    strides: ClassVar[tuple[int, ...]]
    blocks_per_stage: ClassVar[int]

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        norm: NormKind = "group",
        width: int = 64,
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        make_norm = norm_layers(norm, norm_groups)
        self.stem = nn.Sequential(
            nn.Conv2d(in_shape[0], width, 3, padding=1, bias=False), make_norm(width), nn.ReLU()
        )
        blocks = []
        channels = width
        for stage, first in enumerate(self.strides):
            for stride in (first, *[1] * (self.blocks_per_stage - 1)):
                blocks.append(_BasicBlock(channels, width * 2**stage, stride, make_norm))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of images ``(batch, channels, height, width)``."""
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class ResNet8(_ResNet):
    """ResNet-8: a 3x3 stem without pooling, and three stages of one basic block each with strides
    1, 2, 2.

    1,227,594 parameters with 10 classes and a width of 64, as in SAGE. Convolutions have no bias;
    their weights are drawn as He et al. do, by the fan out.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        norm: The normalisation layer.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        width: Channels of the stem and first stage; later stages double it. Published: 64.
    """

    strides = (1, 2, 2)
    blocks_per_stage = 1

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        norm: NormKind = "batch",
        width: int = 64,
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__(num_classes, in_shape, norm, width, norm_groups)
        draw_by_fan_out(self)


class ResNet18(_ResNet):
    """ResNet-18, CIFAR form: 3x3 stem without pooling, four stages of two basic blocks with strides
    1, 2, 2, 2.

    11,173,962 parameters with 10 classes, with batch norm or group norm (FedRGD: group norm with 32
    groups in every layer, the shortcuts included). Convolutions have no bias; initialisation is
    PyTorch's default. Weights that are stored under the names of torchvision's and timm's
    ``resnet18`` fit with ``norm: batch`` (theirs for ImageNet have a 7x7 stem, which differs:
    ``model.init_except: [stem, classifier]``).

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        norm: The normalisation layer.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        width: Channels of the stem and first stage; later stages double it. Published: 64.
    """

    strides = (1, 2, 2, 2)
    blocks_per_stage = 2

    def own_name(self, name: str) -> str:
        """``layer2.0.bn1.weight`` of torchvision and timm is ``blocks.2.norm1.weight`` here, and so
        on.
        """
        if block := re.match(r"layer(\d)\.(\d)\.", name):
            stage, index = map(int, block.groups())
            rest = name[block.end() :].replace("downsample.", "shortcut.").replace("bn", "norm")
            return f"blocks.{2 * (stage - 1) + index}.{rest}"
        for theirs, ours in (("conv1.", "stem.0."), ("bn1.", "stem.1."), ("fc.", "classifier.")):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


class _Residual(nn.Module):
    """The sum of layers' input and output."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.layers(x)
        return total


class _GlobalMaxPool(nn.Module):
    """The largest value of every channel, ``(batch, channels)``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, x.shape[-2:]).flatten(1)


class ResNet9(LayeredNetwork):
    """ResNet-9: convolutions of 64, 128, 256 and 512 channels, two residual pairs, global
    max-pooling, linear.

    conv 64; conv 128, pool 2; residual(128, 128); conv 256, pool 2; conv 512, pool 2; residual(512,
    512); max-pool; linear. With 10 classes: 6,575,370 parameters as in FedRGD (``norm="group"``,
    with biases), 6,568,640 as in FedMatch (``norm="none", bias=False``). The last max-pooling is
    over the whole feature map, which is 4 x 4 for the published 32 x 32 images. Images must have at
    least 8 x 8 pixels. Initialisation is PyTorch's default.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        norm: The normalisation layer after each convolution.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        bias: Whether convolutions and the linear layer have biases.
        width: Channels of the first convolution; the others are 2, 4 and 8 times as wide.
            Published: 64.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        norm: NormKind = "group",
        bias: bool = True,
        width: int = 64,
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        conv = partial(conv_norm_relu, norm=norm_layers(norm, norm_groups), bias=bias)
        c2 = 2 * width
        c4 = 8 * width
        self.conv1 = conv(in_shape[0], width)
        self.conv2 = conv(width, c2)
        self.residual1 = nn.Sequential(conv(c2, c2), conv(c2, c2))
        self.conv3 = conv(c2, 4 * width)
        self.conv4 = conv(4 * width, c4)
        self.residual2 = nn.Sequential(conv(c4, c4), conv(c4, c4))
        self.classifier = nn.Linear(c4, num_classes, bias=bias)

    def chain(self) -> Layers:
        """The layers by name, in the order in which they are applied.

        A residual pair is one layer.
        """
        return [
            ("conv1", self.conv1),
            ("conv2", self.conv2),
            ("pool2", MaxPool2d()),
            ("residual1", _Residual(self.residual1)),
            ("conv3", self.conv3),
            ("pool3", MaxPool2d()),
            ("conv4", self.conv4),
            ("pool4", MaxPool2d()),
            ("residual2", _Residual(self.residual2)),
            ("pool", _GlobalMaxPool()),
            ("classifier", self.classifier),
        ]
