"""AlexNet for images of 32 pixels, as Semi-SFL trains it on CIFAR-10."""

from __future__ import annotations

from torch import nn

from lightning_fedssl.models.network import InShape, LayeredNetwork, MaxPool2d, check_pixels


class AlexNet(LayeredNetwork):
    """Five 3x3 convolutions of 64, 192, 384, 256 and 256 channels, each with ReLU, and three linear
    layers.

    A 2x2 max-pool follows the first, second and fifth convolution; dropout precedes both hidden
    linear layers, which have 4,096 units. With images of 32 x 32 pixels and 10 classes: 35,855,178
    parameters, 2,251,584 of them in the convolutions (split index 5), which give 4,096 features.
    Initialisation is PyTorch's default. Source: the authors' code of Semi-SFL (arXiv 2307.15870).
    The paper's text names larger kernels, which do not give the published sizes.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 8 x 8 pixels up; comes
            from the data.
        width: Channels of the first convolution; all other widths scale with it. Published: 64.
        dropout: Probability that a unit is dropped before a hidden linear layer.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        width: int = 64,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_pixels("AlexNet", in_shape, 8)
        channels, height, side = in_shape
        layers = []
        for multiple, pool in ((1, True), (3, True), (6, False), (4, False), (4, True)):
            layers += [nn.Conv2d(channels, multiple * width, 3, padding=1), nn.ReLU()]
            layers += [MaxPool2d()] if pool else []
            channels = multiple * width
        hidden = 64 * width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels * (height // 8) * (side // 8), hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
