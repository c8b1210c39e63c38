"""VGG-11 and VGG-16 with norm layers, for images of 32 pixels and more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_fedssl.models.layers import DEFAULT_GROUPS, NormKind, NormLayers, norm_layers
from lightning_fedssl.models.network import GlobalAverage, InShape, LayeredNetwork, check_pixels


class VGG11(LayeredNetwork):
    """Eight 3x3 convolutions, each with norm and ReLU, and five 2x2 max-pools; average pooling and
    one linear layer.

    Channels 64, pool, 128, pool, 256, 256, pool, 512, 512, pool, 512, 512, pool: configuration A of
    K. Simonyan and A. Zisserman (ICLR 2015, arXiv 1409.1556) with one linear layer, as FedRGD
    trains it on STL-10: 9,231,114 parameters with 10 classes. Convolutions have biases;
    initialisation is PyTorch's default. For 32 x 32 pixels the last feature map is 1 x 1. For
    larger images, whose size FedRGD does not state, the feature map is averaged.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 32 x 32 pixels up; comes
            from the data.
        norm: The normalisation layer after each convolution.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        width: Channels of the first convolution; the others scale with it. Published: 64.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        norm: NormKind = "group",
        width: int = 64,
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        stages = ((1,), (2,), (4, 4), (8, 8), (8, 8))
        layers = _convolutions(in_shape[0], stages, width, norm_layers(norm, norm_groups))
        self.features = nn.Sequential(*layers, GlobalAverage())
        self.classifier = nn.Linear(8 * width, num_classes)


class VGG16(LayeredNetwork):
    """Thirteen 3x3 convolutions, each with norm and ReLU, and five 2x2 max-pools; three linear
    layers.

    Channels 64, 64, pool, 128, 128, pool, 256 three times, pool, 512 three times, pool, 512 three
    times, pool: configuration D of K. Simonyan and A. Zisserman (ICLR 2015, arXiv 1409.1556). The
    fourth pool pads by one pixel; dropout of 0.5 follows both hidden linear layers. With images of
    144 x 144 pixels and 100 classes: 14,723,136 parameters in the convolutions (split index 13),
    which give 12,800 features, and 69,623,908 after them. Initialisation is PyTorch's default.
    Source: the authors' code of Semi-SFL (arXiv 2307.15870).

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 16 x 16 pixels up; comes
            from the data.
        norm: The normalisation layer after each convolution.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        width: Channels of the first convolution; all other widths scale with it. Published: 64.
    """

    def __init__(
        self,
        num_classes: int = 100,
        in_shape: InShape = (3, 144, 144),
        norm: NormKind = "batch",
        width: int = 64,
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        check_pixels("VGG16", in_shape, 16)
        rows, columns = ((n // 8 // 2 + 1) // 2 for n in in_shape[1:])
        stages = ((1, 1), (2, 2), (4,) * 3, (8,) * 3, (8,) * 3)
        hidden = 64 * width
        make_norm = norm_layers(norm, norm_groups)
        layers = _convolutions(in_shape[0], stages, width, make_norm, (0, 0, 0, 1, 0))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * width * rows * columns, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, num_classes),
        )


def _convolutions(
    channels: int,
    stages: Sequence[Sequence[int]],
    width: int,
    make_norm: NormLayers,
    padding: Sequence[int] = (0,) * 5,
) -> list[nn.Module]:
    """Stages of convolutions, each with norm and ReLU, and a max-pool after each stage.

    Args:
        channels: Channels of the images.
        stages: For every stage the channels of its convolutions, in multiples of ``width``.
        width: The unit of ``stages``, in channels.
        make_norm: Makes the norm layer after each convolution.
        padding: Padding of the max-pool of each stage.
    """
    layers = []
    for stage, pool_padding in zip(stages, padding, strict=True):
        for multiple in stage:
            out = multiple * width
            layers += [nn.Conv2d(channels, out, 3, padding=1), make_norm(out), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2, padding=pool_padding))
    return layers
