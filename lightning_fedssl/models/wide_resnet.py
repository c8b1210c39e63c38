"""Wide residual networks (Zagoruyko and Komodakis, BMVC 2016) in the form that SemiFL trains."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fedssl.models.layers import (
    DEFAULT_GROUPS,
    NormKind,
    NormLayers,
    draw_by_fan_out,
    norm_layers,
)
from lightning_fedssl.models.network import InShape, Network


class _PreActivationBlock(nn.Module):
    """``conv2(relu(norm2(conv1(a)))) + x`` where ``a = relu(norm1(x))``.

    Where the number of channels changes, a 1x1 convolution of ``a`` replaces the shortcut ``x``.
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, make_norm: NormLayers
    ) -> None:
        super().__init__()
        self.norm1 = make_norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = make_norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm1(x).relu()
        out: Tensor = self.conv2(self.norm2(self.conv1(a)).relu())
        return out + (x if self.shortcut is None else self.shortcut(a))


class WideResNet(Network):
    """WRN-``depth``-``widen_factor``: 3x3 stem, three groups of pre-activation blocks, global
    average pooling, linear.

    WRN-28-2 with 10 classes has 1,467,610 parameters, WRN-28-8 with 100 classes 23,401,012
    (SemiFL's CIFAR-10 and CIFAR-100 networks, arXiv 2106.01432 and the authors' code). The stem has
    16 channels, the groups 16, 32 and 64 times ``widen_factor``, with strides 1, 2 and 2.
    Convolutions have no bias and are initialised Kaiming normal (fan out). Norm layers are
    initialised with scale 1 and shift 0, the linear layer with PyTorch's default weight and a bias
    of 0.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``; comes from the data.
        depth: Weight layers, 6n + 4 for n blocks in a group (10, 16, 22, 28, 34, 40, ...).
        widen_factor: k, the factor of all widths but the stem's.
        norm: The normalisation layer. SemiFL's runs use ``static_batch``.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.

    Raises:
        ValueError: ``depth`` is not 6n + 4, or ``widen_factor`` is below 1.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        depth: int = 28,
        widen_factor: int = 2,
        norm: NormKind = "batch",
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(
                f"model.network.init_args.depth is {depth}; a WideResNet has 6n + 4 layers: 10, "
                "16, 22, 28, 34, 40, ..."
            )
        if widen_factor < 1:
            raise ValueError(f"model.network.widen_factor is {widen_factor}: give 1 or more")
        make_norm = norm_layers(norm, norm_groups)
        widths = (16, 16 * widen_factor, 32 * widen_factor, 64 * widen_factor)
        self.stem = nn.Conv2d(in_shape[0], widths[0], 3, padding=1, bias=False)
        blocks = []
        for group, width in enumerate(widths[1:]):
            for index in range((depth - 4) // 6):
                channels = width if index else widths[group]
                stride = 1 if index or not group else 2
                blocks.append(_PreActivationBlock(channels, width, stride, make_norm))
        self.blocks = nn.Sequential(*blocks)
        self.norm = make_norm(widths[-1])
        self.classifier = nn.Linear(widths[-1], num_classes)
        draw_by_fan_out(self)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of images ``(batch, channels, height, width)``."""
        features = self.norm(self.blocks(self.stem(x))).relu()
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits
