"""A small convolutional network for signals."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.models.layers import NormKind, make_norm
from lightning_fedssl.models.network import InShape, Network


class SignalCNN(Network):
    """Three convolutions over 5 time steps of ``width``, ``2 width`` and ``4 width`` channels, and
    a linear layer.

    Norm and ReLU follow each convolution, a max-pool over 2 steps the first two, the mean over time
    the third, so signals from 4 steps up are taken. A signal is treated as an image of one row, so
    all norms of images apply. No paper's network.

    Args:
        num_classes: Outputs; comes from the data.
        in_shape: Shape of one signal, ``(channels, time)``; comes from the data.
        width: Channels of the first convolution.
        norm: The normalisation layer after each convolution. With ``none`` the convolutions have
            biases instead.

    Raises:
        ValueError: If samples are not signals.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_shape: InShape = (1, 64),
        width: int = 16,
        norm: NormKind = "group",
    ) -> None:
        super().__init__()
        if len(in_shape) != 2:
            raise ValueError(
                f"model.network: SignalCNN takes signals (channels, time), not samples {in_shape}"
            )
        channels = (in_shape[0], width, 2 * width, 4 * width)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, (1, 5), padding=(0, 2), bias=norm == "none")
            for a, b in pairwise(channels)
        )
        self.norms = nn.ModuleList(make_norm(norm, c) for c in channels[1:])
        self.classifier = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of signals ``(batch, channels, time)``."""
        x = x.unsqueeze(2)
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if index:
                x = F.max_pool2d(x, (1, 2))
            x = norm(conv(x)).relu()
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits
