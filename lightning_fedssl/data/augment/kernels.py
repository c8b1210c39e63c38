"""Image operations on batches with one parameter row per image, bitwise identical to Pillow's.

Every kernel is a pure function ``(images, parameters) -> images``: uint8 images ``(n, channels,
height, width)`` and float64 parameters ``(n, p)``, row i for image i; columns that a kernel does
not name are ignored. Image i of the result depends on image i and row i alone, through integer
arithmetic and single, correctly rounded floating-point operations: the result does not depend on
the batch, and is the same on GPU and CPU.

The reference is Pillow: ``ImageOps``, ``ImageEnhance``, ``Image.transform`` (Geometry.c, Blend.c,
Filter.c). The functions at the end of this module convert a magnitude to a parameter row; they run
once, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]
"""``(images, parameters) -> images``, see the module's description."""

Size = tuple[int, int]
"""Height and width in pixels."""


def gather_pixels(images: Tensor, index: Tensor) -> Tensor:
    """Read every output pixel from one position of the same image.

    Args:
        images: ``(n, channels, height, width)``.
        index: ``(n, height * width)`` int64, flat source positions.

    Returns:
        A tensor like ``images``.
    """
    source = images.flatten(2)
    return source.gather(2, index[:, None].expand(-1, images.shape[1], -1)).view(images.shape)


def _lookup(images: Tensor, tables: Tensor) -> Tensor:
    """Replace every pixel by its entry in ``tables``, ``(n, channels or 1, 256)`` uint8."""
    tables = tables.expand(-1, images.shape[1], -1)
    return tables.gather(2, images.flatten(2).long()).view(images.shape)


def _blend(background: Tensor, images: Tensor, parameters: Tensor) -> Tensor:
    """``background + factor * (images - background)`` in float32, clipped and truncated as Pillow
    does.
    """
    factor = parameters[:, :1, None, None].float()
    background = background.float()
    difference = images.float() - background
    return difference.mul_(factor).add_(background).clamp_(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Luma of ITU-R 601 in 16-bit fixed point, ``(n, 1, height, width)`` int32.

    Grey images are not changed.
    """
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().unbind(1)
    luma = red.mul_(19595).add_(green.mul_(38470)).add_(blue.mul_(7471)).add_(0x8000)
    return (luma >> 16)[:, None]


def table(images: Tensor, parameters: Tensor) -> Tensor:
    """A fixed function of the pixel value; parameters: its 256 values."""
    return _lookup(images, parameters[:, None, :256].to(torch.uint8))


def color(images: Tensor, parameters: Tensor) -> Tensor:
    """Saturation: blend with the grey image; parameters: the factor (1 changes nothing)."""
    return _blend(_grey(images), images, parameters)


def contrast(images: Tensor, parameters: Tensor) -> Tensor:
    """Blend with the image's mean grey value, rounded; the parameter is the factor (1 changes
    nothing).
    """
    pixels = images.shape[2] * images.shape[3]
    total = _grey(images).sum((2, 3), keepdim=True)
    mean = (2 * total + pixels) // (2 * pixels)
    values = torch.arange(256, device=images.device)[None, None, None]
    return _lookup(images, _blend(mean, values, parameters)[:, 0])


def sharpness(images: Tensor, parameters: Tensor) -> Tensor:
    """Blend with the smoothed image; parameters: the factor (below 1 blurs, above 1 sharpens).

    The smoothing weighs the centre 5/13 and its eight neighbours 1/13; border pixels keep their
    value.
    """
    height, width = images.shape[2:]
    if min(height, width) < 3:
        return images
    wide = images.short()
    rows = (wide[:, :, :-2] + wide[:, :, 1:-1]).add_(wide[:, :, 2:])
    sums = (
        (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).add_(wide[:, :, 1:-1, 1:-1], alpha=4)
    )
    smooth = images.clone()
    # (2 s + 13) / 26 is s / 13 rounded to nearest; it is never an integer, so float32 cannot
    # truncate wrongly.
    smooth[:, :, 1:-1, 1:-1] = (sums.float().mul_(2).add_(13) / 26).to(torch.uint8)
    return _blend(smooth, images, parameters)


def auto_contrast(images: Tensor, parameters: Tensor) -> Tensor:
    """Stretch every channel to 0..255; a constant channel is not changed. No parameters."""
    low = images.amin((2, 3)).double()[..., None]
    high = images.amax((2, 3)).double()[..., None]
    # Tensor by tensor: a number divided by a tensor multiplies by a reciprocal, which rounds
    # differently.
    scale = torch.full_like(low, 255) / (high - low)
    values = torch.arange(256, device=images.device, dtype=torch.float64)
    tables = (values * scale - low * scale).clamp(0, 255)
    return _lookup(images, torch.where(high > low, tables, values).to(torch.uint8))


def equalize(images: Tensor, parameters: Tensor) -> Tensor:
    """Equalise the histogram of every channel with Pillow's integer rule. No parameters."""
    n, channels = images.shape[:2]
    counts = _histograms(images)
    highest = images.amax((2, 3))[..., None].long()
    step = (counts.sum(2, keepdim=True) - counts.gather(2, highest)) // 255
    before = counts.cumsum(2) - counts
    tables = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    unchanged = torch.arange(256, device=images.device).expand(n, channels, 256)
    return _lookup(images, torch.where(step > 0, tables, unchanged).to(torch.uint8))


def _histograms(images: Tensor) -> Tensor:
    """Counts per value: ``(n, channels, 256)`` int64. Integer sums, so the order of additions does
    not matter.
    """
    n, channels = images.shape[:2]
    counts = torch.zeros(n * channels * 256, dtype=torch.int64, device=images.device)
    first = torch.arange(0, len(counts), 256, device=images.device).view(n, channels, 1)
    index = (images.flatten(2) + first).flatten()
    return counts.scatter_add_(0, index, torch.ones_like(index)).view(n, channels, 256)


def affine_nearest(images: Tensor, parameters: Tensor) -> Tensor:
    """Affine map, nearest pixel, black outside, in Pillow's 16.16 fixed point.

    Args:
        images: The batch.
        parameters: (a, b, c, d, e, f): output pixel (x, y) reads from (a x + b y + c, d x + e y +
            f).
    """
    height, width = images.shape[2:]
    a, b, c, d, e, f = parameters[:, :6, None, None].unbind(1)
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    column = (_fixed(c + a * 0.5 + b * 0.5) + y * _fixed(b) + x * _fixed(a)) >> 16
    row = (_fixed(f + d * 0.5 + e * 0.5) + y * _fixed(e) + x * _fixed(d)) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = (row * width + column) * inside
    return gather_pixels(images, index.flatten(1)) * inside[:, None]


def _fixed(value: Tensor) -> Tensor:
    """16.16 fixed point, rounded to nearest."""
    return (value * 65536 + 0.5).floor().long()


def affine_bilinear(images: Tensor, parameters: Tensor) -> Tensor:
    """Affine map as :func:`affine_nearest`, interpolated between four pixels in float64, truncated
    as Pillow does.
    """
    height, width = images.shape[2:]
    a, b, c, d, e, f = parameters[:, :6, None, None].unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    column = a * x + b * y + c
    row = d * x + e * y + f
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    left, right, dx = _neighbours(column - 0.5, width)
    upper, lower, dy = _neighbours(row - 0.5, height)
    top = _mix(images, upper * width, left, right, dx)
    bottom = _mix(images, lower * width, left, right, dx)
    return bottom.sub_(top).mul_(dy).add_(top).to(torch.uint8) * inside[:, None]


def affine_filled(images: Tensor, parameters: Tensor) -> Tensor:
    """Affine map as :func:`affine_bilinear`; a seventh parameter is the value outside."""
    inside = affine_bilinear(torch.full_like(images[:, :1], 255), parameters) == 255
    fill = parameters[:, 6, None, None, None].to(torch.uint8)
    return torch.where(inside, affine_bilinear(images, parameters), fill)


def _neighbours(position: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two pixels around a position, kept inside the image, and the weight of the second, ``(n,
    1, h, w)``.
    """
    first = position.floor()
    index = first.long()
    return index.clamp(0, side - 1), (index + 1).clamp(0, side - 1), (position - first)[:, None]


def _mix(images: Tensor, row: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """Interpolate along one row: float64, like ``images``."""
    first = gather_pixels(images, (row + left).flatten(1))
    second = gather_pixels(images, (row + right).flatten(1))
    return second.double().sub_(first).mul_(weight).add_(first)


def cutout(images: Tensor, parameters: Tensor) -> Tensor:
    """Paint a square, whose centre is uniform in the image, in one grey value.

    The square starts at ``max(0, centre - side / 2)`` and ends ``side`` pixels later, inclusive, as
    in the public implementations of FixMatch's RandAugment.

    Args:
        images: The batch.
        parameters: (side, grey, row, column): the last two are uniform numbers in [0, 1) for the
            position of the centre.
    """
    height, width = images.shape[2:]
    side, grey, row, column = parameters[:, :4].unbind(1)
    rows = _span(row * height, side, height)
    columns = _span(column * width, side, width)
    hole = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(hole, grey.to(torch.uint8)[:, None, None, None], images)


def _span(centre: Tensor, side: Tensor, length: int) -> Tensor:
    """Which of ``length`` positions a square covers: ``(n, length)`` bool."""
    start = (centre - side / 2).clamp(min=0).floor()[:, None]
    positions = torch.arange(length, device=centre.device)
    return (positions >= start) & (positions <= start + side[:, None])


def brightness_table(factor: float) -> list[float]:
    """Parameters of :func:`table` that blend with black by ``factor`` (1 changes nothing)."""
    single = torch.arange(256, dtype=torch.float32) * torch.tensor(factor, dtype=torch.float32)
    return single.clamp(max=255).trunc().tolist()


def posterize_table(bits: int) -> list[float]:
    """Parameters of :func:`table` that keep the ``bits`` highest bits."""
    step = 1 << (8 - bits)
    return (torch.arange(256) // step * step).tolist()


def solarize_table(threshold: int) -> list[float]:
    """Parameters of :func:`table` that invert values from ``threshold`` on; 0 inverts all."""
    values = torch.arange(256)
    return torch.where(values < threshold, values, 255 - values).tolist()


def rotation(degrees: float, size: Size) -> list[float]:
    """Affine parameters that turn counter-clockwise about the centre, rounded as ``Image.rotate``
    rounds them.
    """
    angle = -math.radians(degrees)
    cosine = round(math.cos(angle), 15)
    sine = round(math.sin(angle), 15)
    return centered((cosine, sine, -sine, cosine), size)


def centered(linear: Sequence[float], size: Size) -> list[float]:
    """Affine parameters of a linear map (a, b, d, e) about the image's centre."""
    a, b, d, e = linear
    y = size[0] / 2
    x = size[1] / 2
    return [a, b, a * -x + b * -y + x, d, e, d * -x + e * -y + y]
