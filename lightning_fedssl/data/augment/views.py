"""Weak and strong augmentation of whole batches on the device.

Every image has its own random numbers.

A view is a chain of stages on uint8 images, then the normalisation. All numbers are drawn first,
from the images' keys (:func:`lightning_fedssl.sampling.uniform`); a stage is a pure function of
images and numbers. An image's view therefore depends on that image and its key alone: the same in
any batch, on any rank, on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.augment import kernels
from lightning_fedssl.data.augment.randaugment import GREY, POOLS, RandAugment
from lightning_fedssl.data.datasets import DatasetSpec
from lightning_fedssl.data.local_data import Views


class Stage(Protocol):
    """One step of a view on uint8 images.

    Attributes:
        draws: How many uniform numbers it needs for each image.
    """

    draws: int

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform uint8 ``images`` ``(n, c, h, w)`` with uniform numbers ``(n, draws)``.

        The input stays as it is.
        """
        ...


class _Constant:
    """A tensor that is made once per device, so that later calls copy nothing from the host."""

    def __init__(self, values: Tensor) -> None:
        self._copies = {values.device: values}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


class Normalize:
    """Pixels to floating numbers, ``(pixel / 255 - mean) / std`` per channel: a view without
    augmentation.

    Args:
        mean: Mean per channel, for pixels scaled to 0..1.
        std: Standard deviation per channel, for pixels scaled to 0..1.
        dtype: The type in which it computes, and of the result.
        scale: The stored value that counts as 1: 255 for pixels, 1 for numbers.
        dimensions: Dimensions of a sample; the first one has a mean and a deviation per entry.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        scale: float = 255,
        dimensions: int = 3,
    ) -> None:
        scaled = scale * torch.tensor([list(mean), list(std)], dtype=torch.float64)
        scaled = scaled.view(2, -1, *[1] * (dimensions - 1))
        self._mean, self._std = map(_Constant, scaled.to(dtype))
        self._exact = _Constant(scaled)
        self._centres = any(mean)
        self.dtype = dtype

    def __call__(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Normalise uint8 ``images``; ``keys`` are ignored."""
        mean = self._mean.on(images.device)
        std = self._std.on(images.device)
        if images.dtype == self.dtype:  # a result of its own: what is given stays as it is
            centred = images - mean
            return centred.div_(std)
        if images.dtype == torch.float64:  # whose differences 32 bits may not hold
            exact_mean, exact_std = self._exact.on(images.device)
            standardised: Tensor = (images - exact_mean) / exact_std
            return standardised.to(self.dtype)
        pixels = images.to(self.dtype)
        return (pixels.sub_(mean) if self._centres else pixels).div_(std)


class FlipCrop:
    """Horizontal flip with probability 1/2, then a random crop after reflect padding, as one
    gather.

    Args:
        flip: Whether images may be mirrored.
        padding: Pixels added on each side; less than the image's side.
    """

    draws = 3

    def __init__(self, flip: bool, padding: int) -> None:
        self.flip = flip
        self.padding = padding
        self._places: dict[int, _Constant] = {}

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform uint8 ``images`` with ``draws`` (flip, row, column), ``(n, 3)``."""
        height, width = images.shape[2:]
        offsets = 2 * self.padding + 1
        row, column = (draws[:, 1:] * offsets).long().unbind(1)
        if self.flip:
            column = torch.where(draws[:, 0] < 0.5, column + offsets, column)
        rows = self._sources(height).on(images.device)[row]
        columns = self._sources(width).on(images.device)[column]
        index = rows[:, :, None] * width + columns[:, None]
        return kernels.gather_pixels(images, index.flatten(1))

    def _sources(self, side: int) -> _Constant:
        """Source positions of one axis by offset, plain and mirrored: ``(2 * (2 * padding + 1),
        side)``.
        """
        if side not in self._places:
            if self.padding >= side:
                raise ValueError(
                    f"data.weak: padding {self.padding} must be smaller than the image's side "
                    f"{side}"
                )
            plain = torch.arange(2 * self.padding + 1)[:, None] + torch.arange(side) - self.padding
            reflected = plain.abs()
            reflected = torch.minimum(reflected, 2 * (side - 1) - reflected)
            self._places[side] = _Constant(torch.cat([reflected, side - 1 - reflected]))
        return self._places[side]


class Cutout:
    """Paint one square at a random position of every image.

    Args:
        side: Side of the square in pixels; its end is included, so it covers ``side + 1`` where it
            fits.
        grey: The value painted.
    """

    draws = 2

    def __init__(self, side: int, grey: int = GREY) -> None:
        self._square = _Constant(torch.tensor([[side, grey]], dtype=torch.float64))

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform uint8 ``images`` with ``draws`` (row, column), ``(n, 2)``."""
        square = self._square.on(images.device).expand(len(images), 2)
        return kernels.cutout(images, torch.cat([square, draws.double()], dim=1))


class View:
    """Stages on uint8 images, then the normalisation: a
    :data:`lightning_fedssl.data.local_data.ViewFunction`.

    Args:
        stages: In order.
        normalize: The last step.
        first_draw: Number of an image's uniform numbers to leave unused, so that two views with the
            same keys are independent of each other.
    """

    def __init__(self, stages: Sequence[Stage], normalize: Normalize, first_draw: int = 0) -> None:
        self.stages = tuple(stages)
        self.normalize = normalize
        self.first_draw = first_draw

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Views of uint8 ``images`` ``(n, c, h, w)`` with ``keys`` ``(n,)``: normalised, the same
        shape.
        """
        return self.normalize(self.augment(images, keys))

    def augment(self, images: Tensor, keys: Tensor) -> Tensor:
        """The view before the normalisation, uint8."""
        if images.dtype != torch.uint8:
            raise TypeError(f"views are made of uint8 images, not of {images.dtype}")
        return _applied(self.stages, images, keys, self.first_draw)


def _applied(stages: Sequence[Stage], images: Tensor, keys: Tensor, first_draw: int = 0) -> Tensor:
    counts = [stage.draws for stage in stages]
    numbers = sampling.uniform(keys, first_draw + sum(counts))[:, first_draw:]
    for stage, draws in zip(stages, numbers.split(counts, dim=1), strict=True):
        images = stage(images, draws)
    return images


class TargetView:
    """Moves a target for every pixel as a weak view moves its image.

    Args:
        stages: Those of the weak view.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    def __call__(self, targets: Tensor, keys: Tensor) -> Tensor:
        """Targets ``(n, height, width)`` of the views with ``keys`` ``(n,)``."""
        return _applied(self.stages, targets[:, None], keys)[:, 0]


_DIGIT_SETS = ("digits", "mnist", "emnist")
_NO_FLIP = (*_DIGIT_SETS, "svhn")
_PADDING = {"mnist": 2}

WEAK = ("auto", "flip_crop", "crop", "none")
"""What ``data.weak`` can be."""
STRONG = ("auto", *POOLS, "none")
"""What ``data.strong`` can be."""


def make_views(
    spec: DatasetSpec,
    weak: str = "auto",
    strong: str = "auto",
    dtype: torch.dtype = torch.float32,
    per_pixel: bool = False,
) -> Views:
    """The views of a data set.

    Args:
        spec: The data set.
        weak: ``flip_crop``, ``crop`` or ``none``. ``auto`` is ``crop`` where mirrored images have
            no meaning (digits, mnist, emnist, svhn) and ``flip_crop`` elsewhere. The padding is an
            eighth of the side, on mnist 2 pixels.
        strong: ``fixmatch``, ``semifl``, ``fedmatch`` or ``digits``, each after a weak view of its
            own, or ``none``: the weak view. ``auto`` is ``digits`` on digits, mnist and emnist and
            ``fixmatch`` elsewhere.
        dtype: The floating type of the views.
        per_pixel: Whether every pixel has a target. Then a strong view has the geometry of the weak
            view with the same keys, and moves nothing else.
    """
    normalize = Normalize(spec.mean, spec.std, dtype, 255 if spec.pixels else 1, len(spec.in_shape))
    first = weak_stages(spec, weak)
    weak_view = View(first, normalize) if first else normalize
    then = strong_stages(spec, strong, per_pixel)
    skipped = 0 if per_pixel else sum(stage.draws for stage in first)
    strong_view = View([*first, *then], normalize, skipped) if then else weak_view
    target = TargetView(first) if per_pixel else None
    return Views(plain=normalize, weak=weak_view, strong=strong_view, target=target)


def weak_stages(spec: DatasetSpec, weak: str = "auto") -> list[Stage]:
    """Stages of the weak view; see :func:`make_views`."""
    if weak == "none":
        return []
    flip = spec.name not in _NO_FLIP if weak == "auto" else weak == "flip_crop"
    return [FlipCrop(flip, _PADDING.get(spec.name, min(spec.in_shape[1:]) // 8))]


def strong_stages(spec: DatasetSpec, strong: str = "auto", per_pixel: bool = False) -> list[Stage]:
    """Stages that the strong view adds to a weak one; see :func:`make_views`."""
    if strong == "none":
        return []
    name = ("digits" if spec.name in _DIGIT_SETS else "fixmatch") if strong == "auto" else strong
    pool = POOLS[name].photometric() if per_pixel else POOLS[name]
    stages: list[Stage] = [RandAugment(pool)]
    if pool.cutout is not None:
        stages.append(Cutout(pool.cutout((spec.in_shape[-2], spec.in_shape[-1])), pool.cutout_grey))
    return stages
