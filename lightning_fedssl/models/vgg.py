"""VGG-11 with norm layers, for images of 32 pixels and more."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fedssl.models.network import InShape, Network
from lightning_fedssl.models.norm import NormKind, make_norm


class VGG11(Network):
    """Eight 3x3 convolutions, each with norm and ReLU, and five 2x2 max-pools; average pooling; one linear layer.

    Channels 64, pool, 128, pool, 256, 256, pool, 512, 512, pool, 512, 512, pool: configuration A of K. Simonyan and
    A. Zisserman (ICLR 2015, arXiv 1409.1556) with one linear layer, as FedRGD trains it on STL-10: 9,231,114 parameters
    with 10 classes. Convolutions have biases; initialisation is PyTorch's default. At 32 x 32 pixels the last map is
    1 x 1; for larger images, whose size FedRGD does not state, it is averaged.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 32 x 32 pixels up; comes from the data.
        norm: The normalisation layer after each convolution.
        width: Channels of the first convolution; the others scale with it. Published: 64.
    """

    def __init__(
        self, num_classes: int = 10, in_shape: InShape = (3, 32, 32), norm: NormKind = "group", width: int = 64
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_shape[0]
        for stage in ((1,), (2,), (4, 4), (8, 8), (8, 8)):
            for multiple in stage:
                out = multiple * width
                layers += [nn.Conv2d(channels, out, 3, padding=1), make_norm(norm, out), nn.ReLU()]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of images ``(batch, channels, height, width)``."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits
