"""Operations on images, bitwise equal to Pillow's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.augment.randaugment import DIGITS, FEDMATCH, FIXMATCH, SEMIFL, Pool, RandAugment
from lightning_fedssl.data.augment.views import Cutout
from tests.data.augment.helpers import BILINEAR, pictures


def to_pillow(image: Tensor) -> Image.Image:
    pixels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[..., 0] if image.shape[0] == 1 else pixels)


def from_pillow(image: Image.Image) -> Tensor:
    pixels = np.array(image)
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def by_pillow(images: Tensor, operation: Callable[[Image.Image], Image.Image]) -> Tensor:
    return torch.stack([from_pillow(operation(to_pillow(image))) for image in images])


def ours(pool: Pool, name: str, magnitude: int, images: Tensor, places: Tensor | None = None) -> Tensor:
    codes = torch.full((len(images),), pool.code(name, magnitude))
    return RandAugment(pool).apply(images, codes, torch.zeros(len(images), 2) if places is None else places)


def affine(image: Image.Image, matrix: tuple[float, ...], resample: Any = Image.Resampling.NEAREST) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample)


def enhance(kind: Any) -> Callable[[Image.Image, int], Image.Image]:
    return lambda im, v: kind(im).enhance(abs(v) * 0.9 / 10 + 0.05)


PILLOW_FIXMATCH: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "AutoContrast": lambda im, v: ImageOps.autocontrast(im),
    "Brightness": enhance(ImageEnhance.Brightness),
    "Color": enhance(ImageEnhance.Color),
    "Contrast": enhance(ImageEnhance.Contrast),
    "Equalize": lambda im, v: ImageOps.equalize(im),
    "Identity": lambda im, v: im,
    "Posterize": lambda im, v: ImageOps.posterize(im, int(abs(v) * 4 / 10) + 4),
    "Rotate": lambda im, v: im.rotate(3 * v),
    "Sharpness": enhance(ImageEnhance.Sharpness),
    "ShearX": lambda im, v: affine(im, (1, v * 0.3 / 10, 0, 0, 1, 0)),
    "ShearY": lambda im, v: affine(im, (1, 0, 0, v * 0.3 / 10, 1, 0)),
    "Solarize": lambda im, v: ImageOps.solarize(im, 256 - int(abs(v) * 256 / 10)),
    "TranslateX": lambda im, v: affine(im, (1, 0, int(v * 0.3 / 10 * im.size[0]), 0, 1, 0)),
    "TranslateY": lambda im, v: affine(im, (1, 0, 0, 0, 1, int(v * 0.3 / 10 * im.size[1]))),
}

PILLOW_SEMIFL: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "AutoContrast": lambda im, s: ImageOps.autocontrast(im),
    "Brightness": lambda im, s: ImageEnhance.Brightness(im).enhance(1.9),
    "Color": lambda im, s: ImageEnhance.Color(im).enhance(1.9),
    "Contrast": lambda im, s: ImageEnhance.Contrast(im).enhance(1.9),
    "Equalize": lambda im, s: ImageOps.equalize(im),
    "Invert": lambda im, s: ImageOps.invert(im),
    "Posterize": lambda im, s: ImageOps.posterize(im, 4),
    "Rotate": lambda im, s: im.rotate(30 * s),
    "Sharpness": lambda im, s: ImageEnhance.Sharpness(im).enhance(1.9),
    "ShearX": lambda im, s: affine(im, (1, 0.3 * s, 0, 0, 1, 0), BILINEAR),
    "ShearY": lambda im, s: affine(im, (1, 0, 0, 0.3 * s, 1, 0), BILINEAR),
    "Solarize": lambda im, s: ImageOps.solarize(im, 0),
    "TranslateX": lambda im, s: affine(im, (1, 0, 100 * s, 0, 1, 0), BILINEAR),
    "TranslateY": lambda im, s: affine(im, (1, 0, 0, 0, 1, 100 * s), BILINEAR),
}


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 20, 33)])
@pytest.mark.parametrize("name", [operation.name for operation in FIXMATCH.operations])
def test_fixmatch_operation_equals_pillow_bitwise(name: str, shape: tuple[int, int, int]) -> None:
    images = pictures(*shape)
    for magnitude in (*range(-9, 0), *range(1, 10)):
        expected = by_pillow(images, lambda im, v=magnitude: PILLOW_FIXMATCH[name](im, v))  # type: ignore[misc]
        assert torch.equal(ours(FIXMATCH, name, magnitude, images), expected), magnitude


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 140, 133)])
@pytest.mark.parametrize("name", [operation.name for operation in SEMIFL.operations if operation.name != "Cutout"])
def test_semifl_operation_equals_pillow_bitwise(name: str, shape: tuple[int, int, int]) -> None:
    images = pictures(*shape, count=6)
    for sign in (-1, 1):
        expected = by_pillow(images, lambda im, s=sign: PILLOW_SEMIFL[name](im, s))  # type: ignore[misc]
        assert torch.equal(ours(SEMIFL, name, 10 * sign, images), expected), sign


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 20, 33)])
@pytest.mark.parametrize("name", ["Rotate", "Scale", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_digits_geometry_equals_pillows_bilinear_transform_bitwise(name: str, shape: tuple[int, int, int]) -> None:
    images = pictures(*shape)
    for magnitude in (-9, -4, 3, 9):
        _, matrix = DIGITS.parameter_rows(shape[1:])[DIGITS.code(name, magnitude)]
        expected = by_pillow(images, lambda im, m=matrix: affine(im, tuple(m), BILINEAR))  # type: ignore[misc]
        assert torch.equal(ours(DIGITS, name, magnitude, images), expected), magnitude


@pytest.mark.parametrize("side", [6, 16, 40])
def test_cutout_equals_pillows_rectangle(side: int) -> None:
    images = pictures(3, 32, 28)
    places = sampling.uniform(sampling.sample_keys(3, len(images)), 2)

    def draw(image: Tensor, place: Tensor) -> Tensor:
        height, width = image.shape[1:]
        y, x = (max(0.0, float(p) * size - side / 2) for p, size in zip(place, (height, width), strict=True))
        x0, y0 = int(x), int(y)
        canvas = to_pillow(image)
        box = (x0, y0, min(width, x0 + side), min(height, y0 + side))
        ImageDraw.Draw(canvas).rectangle(box, (127, 127, 127))
        return from_pillow(canvas)

    expected = torch.stack([draw(image, place) for image, place in zip(images, places, strict=True)])
    assert torch.equal(Cutout(side)(images, places), expected)
    if side == 40:
        assert torch.equal(ours(SEMIFL, "Cutout", 10, images, places), expected)


def test_semifl_translation_leaves_a_32_pixel_image_black() -> None:
    images = pictures()
    for name in ("TranslateX", "TranslateY"):
        for magnitude in (10, -10):
            assert not ours(SEMIFL, name, magnitude, images).any()


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_fedmatch_s_maps_are_pillow_s_with_grey_outside(name: str) -> None:
    shape = (3, 32, 32)
    images = torch.randint(0, 256, (20, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for magnitude in (4, -4) if name != "Rotate" else (2,):
        code = FEDMATCH.code(name, magnitude)
        _, parameters = FEDMATCH.parameter_rows(shape[1:])[code]
        ours = RandAugment(FEDMATCH).apply(images, torch.full((20,), code), torch.zeros(20, 2))
        matrix = tuple(parameters[:6])

        def by_matrix(image: Image.Image, m: Any = matrix) -> Image.Image:
            return image.transform(image.size, Image.Transform.AFFINE, m, BILINEAR, fillcolor=(128,) * 3)

        theirs = by_pillow(images, by_matrix)
        assert (ours.int() - theirs.int()).abs().max() <= 1
