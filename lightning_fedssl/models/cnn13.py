"""The 13-layer convolutional network of the semi-supervised literature."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.models.layers import DEFAULT_GROUPS, NormKind, norm_layers
from lightning_fedssl.models.network import InShape, Network, max_pool


class CNN13(Network):
    """Nine convolutions in three stages, each with norm and leaky ReLU(0.1); dropout, average
    pooling and a linear layer.

    The stages of 128 and 256 channels each have three 3x3 convolutions, a 2x2 max-pool and dropout
    of 0.5. The last stage has a 3x3 convolution without padding to 512 channels, and 1x1
    convolutions to 256 and 128. This is Fed-SHVR's CIFAR-10 network in the form of Mean Teacher
    (Tarvainen and Valpola, NIPS 2017), without Mean Teacher's input noise and weight normalisation:
    3,121,802 parameters.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one image, ``(channels, height, width)``, from 12 x 12 pixels up; comes
            from the data.
        norm: The normalisation layer after each convolution. With ``none`` the convolutions have
            biases instead.
        norm_groups: Groups of a group norm; layers with fewer channels have a group per channel.
        width: Channels of the first stage.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (3, 32, 32),
        norm: NormKind = "batch",
        width: int = 128,
        norm_groups: int = DEFAULT_GROUPS,
    ) -> None:
        super().__init__()
        w = width
        kernels = (3, 3, 3, 3, 3, 3, 3, 1, 1)
        channels = (in_shape[0], w, w, w, 2 * w, 2 * w, 2 * w, 4 * w, 2 * w, w)
        self.convs = nn.ModuleList(
            nn.Conv2d(channels[i], channels[i + 1], kernel, padding=int(i < 6), bias=norm == "none")
            for i, kernel in enumerate(kernels)
        )
        self.norms = nn.ModuleList(map(norm_layers(norm, norm_groups), channels[1:]))
        self.classifier = nn.Linear(w, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of images ``(batch, channels, height, width)``."""
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.leaky_relu(norm(conv(x)), 0.1)
            if index in (2, 5):
                x = F.dropout(max_pool(x), 0.5, self.training)
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits
