"""Layers that networks share: normalisation by name, and static batch norm (sBN)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

NormKind = Literal["batch", "static_batch", "group", "none"]
"""Running statistics (``batch``), :class:`StaticBatchNorm2d`, group norm, or no normalisation."""

NormLayers = Callable[[int], nn.Module]
"""Makes the normalisation layer for a number of channels."""

DEFAULT_GROUPS = 32
"""Groups of a group norm in FedRGD's networks, whose layers have 64 channels and more."""


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose running statistics training never changes (HeteroFL's and SemiFL's static
    batch norm, sBN).

    In training the layer normalises with the batch's own statistics and neither reads nor writes
    the buffers. In evaluation it normalises with the buffers ``running_mean`` and ``running_var``,
    ``(channels,)`` each. They are mean 0 and variance 1 until the callback ``StaticBatchNorm`` sets
    them.

    ``eps`` is 1e-5. The layer has a scale and a shift, but no ``num_batches_tracked``.

    Args:
        channels: Channels of the input, ``(batch, channels, height, width)``.
    """

    # torch's own forward already does this: with track_running_stats off it uses the buffers in
    # evaluation only.
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))


def num_groups(channels: int, at_most: int = DEFAULT_GROUPS) -> int:
    """Groups of a group norm: the largest divisor of ``channels`` up to ``at_most`` (32 groups of
    64 channels).

    With as many groups as channels, group norm is instance norm: each channel of each image is
    normalised separately.

    Args:
        channels: Channels of the feature map.
        at_most: The configured number of groups.

    Raises:
        ValueError: ``at_most`` is below 1.
    """
    if at_most < 1:
        raise ValueError(f"model.network.init_args.norm_groups is {at_most}: give 1 or more")
    return next(groups for groups in range(min(at_most, channels), 0, -1) if channels % groups == 0)


def make_norm(kind: NormKind, channels: int, groups: int = DEFAULT_GROUPS) -> nn.Module:
    """A normalisation layer for feature maps ``(batch, channels, height, width)``.

    Args:
        kind: One of :data:`NormKind`.
        channels: Channels of the feature map.
        groups: Groups of a group norm; where they do not divide the channels, see
            :func:`num_groups`.

    Raises:
        ValueError: ``kind`` is not one of the names.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "static_batch":
        return StaticBatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(num_groups(channels, groups), channels)
    if kind == "none":
        return nn.Identity()
    raise ValueError(
        f"model.network.init_args.norm is {kind!r}; choose batch, static_batch, group or none."
    )


def norm_layers(kind: NormKind, groups: int) -> NormLayers:
    """:func:`make_norm` with the kind and the groups set: a function of the number of channels
    alone.

    Args:
        kind: One of :data:`NormKind`.
        groups: Groups of a group norm.
    """
    return partial(make_norm, kind, groups=groups)


def conv_norm_relu(
    channels_in: int, channels_out: int, norm: NormLayers, bias: bool
) -> nn.Sequential:
    """A 3x3 convolution that keeps the size of the image, a norm layer and ReLU.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        norm: Makes the norm layer.
        bias: Whether the convolution has a bias.
    """
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=bias)
    return nn.Sequential(conv, norm(channels_out), nn.ReLU())


def draw_by_fan_out(network: nn.Module) -> None:
    """Draw the weights of all convolutions again, as He et al. do by the fan out."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
