"""The small convolutional network that Semi-SFL trains on SVHN."""

from __future__ import annotations

from torch import nn

from lightning_fedssl.models.network import InShape, LayeredNetwork, MaxPool2d, check_pixels


class SVHNCNN(LayeredNetwork):
    """Two 5x5 convolutions of 32 and 64 channels without padding, each with ReLU and a 2x2
    max-pool; two linear layers.

    The hidden linear layer has 512 units. With images of 32 x 32 pixels and 10 classes: 878,538
    parameters, 53,696 of them in the convolutions (split index 2), which give 1,600 features.
    Initialisation is PyTorch's default. Source: Semi-SFL (arXiv 2307.15870), section V-A and the
    authors' code.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 16 x 16 pixels up; comes
            from the data.
        width: Channels of the first convolution; the second has twice as many. Published: 32.
        hidden: Units of the hidden linear layer. Published: 512.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        width: int = 32,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        check_pixels("SVHNCNN", in_shape, 16)
        rows, columns = (((n - 4) // 2 - 4) // 2 for n in in_shape[1:])
        self.features = nn.Sequential(
            nn.Conv2d(in_shape[0], width, 5), nn.ReLU(), MaxPool2d(),
            nn.Conv2d(width, 2 * width, 5), nn.ReLU(), MaxPool2d(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * width * rows * columns, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
