"""The small convolutional network that FedRGD trains on EMNIST."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fedssl.models.layers import DEFAULT_GROUPS, NormKind, norm_layers
from lightning_fedssl.models.network import InShape, Network, max_pool


class EMNISTCNN(Network):
    """Two 3x3 convolutions of 32 and 64 channels without padding, a 2x2 max-pool, two linear
    layers.

    conv 32, ReLU, conv 64, max-pool 2, channel dropout 0.25, ReLU, linear 128, ReLU, linear. With
    47 classes and images of 28 x 28 pixels: 1,204,655 parameters, 192 more with group norm. The
    authors' code creates group-norm layers but never calls them, so the published numbers are those
    of ``norm: none``. With another ``norm``, a norm layer follows each convolution. Source: FedRGD
    (IEEE BigData 2021, arXiv 2008.11364), authors' code.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 6 x 6 pixels up; comes
            from the data.
        norm: The normalisation layer after each convolution.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
    """

    def __init__(
        self,
        num_classes: int = 47,
        in_shape: InShape = (1, 28, 28),
        norm: NormKind = "none",
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        channels, height, width = in_shape
        make_norm = norm_layers(norm, norm_groups)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.norm1 = make_norm(32)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.norm2 = make_norm(64)
        self.dropout = nn.Dropout2d(0.25)
        self.linear = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of images ``(batch, channels, height, width)``."""
        x = self.norm1(self.conv1(x)).relu()
        x = max_pool(self.norm2(self.conv2(x)))
        x = self.dropout(x).relu().flatten(1)
        logits: Tensor = self.classifier(self.linear(x).relu())
        return logits
