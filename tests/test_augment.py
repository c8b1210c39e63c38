from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.augment import kernels, randaugment
from lightning_fedssl.data.augment.randaugment import DIGITS, FEDMATCH, FIXMATCH, SEMIFL, Operation, Pool, RandAugment
from lightning_fedssl.data.augment.views import (
    Cutout,
    FlipCrop,
    Normalize,
    View,
    make_views,
    strong_stages,
    weak_stages,
)

MEAN, STD = (0.49, 0.48, 0.45), (0.20, 0.19, 0.21)
BILINEAR = Image.Resampling.BILINEAR


def spec(name: str = "cifar10", channels: int = 3, side: int = 32) -> Any:
    return SimpleNamespace(name=name, in_shape=(channels, side, side), mean=MEAN[:channels], std=STD[:channels])


def pictures(channels: int = 3, height: int = 32, width: int = 32, count: int = 12, seed: int = 0) -> Tensor:
    """Noise, noise of low contrast, smooth pictures, and one of a single and one of two values."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (count, channels, height, width))
    wave = np.sin(np.linspace(0, 5, height))[:, None] * np.cos(np.linspace(0, 7, width))
    smooth = 128 + 100 * wave * rng.random((count, channels, 1, 1)) + rng.normal(0, 4, noise.shape)
    images = np.where((np.arange(count) % 3 == 0)[:, None, None, None], noise, smooth)
    images[1] = 90 + noise[1] // 8
    images[2], images[4] = 77, np.where(noise[4] < 30, 20, 200)
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))


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


def test_point_operations_are_within_one_grey_level_of_torchvision() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = pictures()
    for v in (1, 5, 9):
        factor = v * 0.9 / 10 + 0.05
        bits, threshold = v * 4 // 10 + 4, 256 - v * 256 // 10
        expected = {
            "AutoContrast": functional.autocontrast(images),
            "Brightness": functional.adjust_brightness(images, factor),
            "Color": functional.adjust_saturation(images, factor),
            "Contrast": functional.adjust_contrast(images, factor),
            "Equalize": functional.equalize(images),
            "Posterize": functional.posterize(images, bits),
            "Sharpness": functional.adjust_sharpness(images, factor),
            "Solarize": functional.solarize(images, threshold),
        }
        for name, reference in expected.items():
            difference = (ours(FIXMATCH, name, v, images).int() - reference.int()).abs()
            assert difference.max() <= 1, (name, v)


def test_rotation_agrees_with_torchvision_but_for_pixels_on_a_border() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = pictures()
    for v in (-9, -3, 4, 8):
        differing = ours(FIXMATCH, "Rotate", v, images) != functional.rotate(images, 3 * v)
        assert differing.float().mean() < 0.01


def test_flip_crop_equals_flip_pad_and_crop_one_by_one() -> None:
    images, padding = pictures(3, 20, 33, count=30), 4
    keys = sampling.sample_keys(1, 30)
    draws = sampling.uniform(keys, 3)
    result = FlipCrop(True, padding)(images, draws)
    for image, (flip, row, column), got in zip(images, draws.tolist(), result, strict=True):
        expected = image.flip(-1) if flip < 0.5 else image
        padded = torch.nn.functional.pad(expected[None].float(), (padding,) * 4, mode="reflect")[0].byte()
        top, left = int(row * 9), int(column * 9)
        assert torch.equal(got, padded[:, top : top + 20, left : left + 33])


def test_flip_crop_reaches_every_offset_and_flips_half() -> None:
    image = torch.arange(81, dtype=torch.uint8).view(1, 1, 9, 9)
    keys = sampling.sample_keys(2, 4000)
    results = FlipCrop(True, 1)(image.expand(4000, 1, 9, 9), sampling.uniform(keys, 3)).flatten(1)
    kinds, counts = results.unique(dim=0, return_counts=True)
    assert len(kinds) == 18
    assert chi_square(counts) < 41  # 0.999 quantile, 17 degrees of freedom
    plain = FlipCrop(False, 1)(image.expand(400, 1, 9, 9), sampling.uniform(keys[:400], 3)).flatten(1)
    assert len(plain.unique(dim=0)) == 9
    assert bool((plain[:, 1] < plain[:, 7]).all())


def test_flip_crop_refuses_a_padding_as_wide_as_the_image() -> None:
    with pytest.raises(ValueError, match=r"data\.weak: padding 4 .* side 4"):
        FlipCrop(True, 4)(pictures(3, 4, 4), torch.zeros(12, 3))


def chi_square(counts: Tensor) -> float:
    expected = counts.double().mean()
    return float(((counts.double() - expected) ** 2 / expected).sum())


def drawn(pool: Pool, count: int) -> Tensor:
    """Codes of the first operation of many images."""
    return RandAugment(pool).codes(sampling.uniform(sampling.sample_keys(5, count), 4))


def test_semifl_draws_operations_uniformly_applies_half_and_uses_both_signs() -> None:
    codes = drawn(SEMIFL, 15000)
    applied = codes[codes < 30]
    assert abs(len(applied) / 15000 - 0.5) < 0.015
    assert chi_square((applied // 2).bincount(minlength=15)) < 36.1  # 0.999 quantile, 14 degrees of freedom
    assert abs((applied % 2).float().mean() - 0.5) < 0.02


def test_fixmatch_draws_operations_magnitudes_and_signs_uniformly() -> None:
    codes = drawn(FIXMATCH, 20000)
    applied = codes[codes < 14 * 18]
    assert abs(len(applied) / 20000 - 0.5) < 0.015
    assert chi_square((applied // 18).bincount(minlength=14)) < 34.5  # 13 degrees of freedom
    assert chi_square((applied // 2 % 9).bincount(minlength=9)) < 26.1  # 8 degrees of freedom
    assert abs((applied % 2).float().mean() - 0.5) < 0.02


def test_second_operation_is_drawn_independently_of_the_first() -> None:
    draws = sampling.uniform(sampling.sample_keys(6, 20000), 12)
    first, second = (RandAugment(SEMIFL).codes(part) for part in draws.split(6, dim=1))
    neither = ((first == 30) & (second == 30)).float().mean()
    assert abs(neither - 0.25) < 0.015


def test_semifl_translation_leaves_a_32_pixel_image_black() -> None:
    images = pictures()
    for name in ("TranslateX", "TranslateY"):
        for magnitude in (10, -10):
            assert not ours(SEMIFL, name, magnitude, images).any()


def test_share_of_black_semifl_views_is_as_derived() -> None:
    images = torch.full((6000, 1, 8, 8), 200, dtype=torch.uint8)
    no_inversion = tuple(
        replace(op, kernel=None) if op.name in ("Invert", "Solarize") else op for op in SEMIFL.operations
    )
    view = View([RandAugment(replace(SEMIFL, operations=no_inversion))], Normalize((0.5,), (0.2,)))
    result = view.augment(images, sampling.sample_keys(0, 6000))
    black = (result == 0).flatten(1).all(1).float().mean()
    assert abs(black - (1 - (14 / 15) ** 2)) < 0.015  # at least one of two operations is a translation, applied


ALL_VIEWS = ["weak", "fixmatch", "semifl", "digits", "fedmatch"]


def view_of(kind: str, channels: int = 3, side: int = 32) -> View:
    views = make_views(spec(channels=channels, side=side), strong="none" if kind == "weak" else kind)
    view = views.strong
    assert isinstance(view, View)
    return view


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ALL_VIEWS)
def test_batch_equals_its_images_one_by_one(kind: str, channels: int) -> None:
    images, keys, view = pictures(channels, count=60), sampling.sample_keys(7, 60), view_of(kind, channels)
    batch = view(images, keys)
    alone = torch.cat([view(images[i : i + 1], keys[i : i + 1]) for i in range(60)])
    assert torch.equal(batch, alone)
    order = torch.randperm(60)
    assert torch.equal(view(images[order], keys[order]), batch[order])


@pytest.mark.parametrize("pool", [FIXMATCH, SEMIFL, DIGITS])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 9, 14)])
def test_static_form_equals_the_form_by_rows(pool: Pool, shape: tuple[int, int, int]) -> None:
    images, draws = pictures(*shape, count=80), sampling.uniform(sampling.sample_keys(8, 80), 12)
    assert torch.equal(RandAugment(pool, static=True)(images, draws), RandAugment(pool, static=False)(images, draws))


def test_rows_are_treated_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images, draws = pictures(count=40), sampling.uniform(sampling.sample_keys(9, 40), 12)
    whole = RandAugment(FIXMATCH)(images, draws)
    monkeypatch.setattr(randaugment, "CACHED_VALUES", 1)
    assert torch.equal(RandAugment(FIXMATCH)(images, draws), whole)


@pytest.mark.parametrize("kind", ALL_VIEWS)
def test_keys_alone_decide_and_the_input_is_left_as_it_is(kind: str) -> None:
    images, keys, view = pictures(), sampling.sample_keys(10, 12), view_of(kind)
    before = images.clone()
    torch.manual_seed(1)
    first = view(images, keys)
    torch.manual_seed(2)
    assert torch.equal(view(images, keys), first)
    assert torch.equal(images, before)
    assert not torch.equal(view(images, sampling.sample_keys(11, 12)), first)
    assert first.dtype == torch.float32
    assert first.shape == images.shape


@pytest.mark.parametrize("kind", ALL_VIEWS)
def test_same_picture_twice_in_a_batch_gets_different_views(kind: str) -> None:
    images = pictures()[:1].expand(16, 3, 32, 32)
    result = view_of(kind)(images, sampling.sample_keys(12, 16))
    assert len(result.flatten(1).unique(dim=0)) >= 12


@pytest.mark.parametrize("kind", ALL_VIEWS)
def test_empty_batch_stays_empty(kind: str) -> None:
    images = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    assert view_of(kind)(images, torch.zeros(0, dtype=torch.int64)).shape == (0, 3, 32, 32)
    assert RandAugment(FIXMATCH, static=True)(images, torch.zeros(0, 12)).shape == (0, 3, 32, 32)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL_VIEWS), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(0, 99))
def test_any_image_size_works(kind: str, height: int, width: int, channels: int, seed: int) -> None:
    shape = SimpleNamespace(name="x", in_shape=(channels, height, width), mean=MEAN[:channels], std=STD[:channels])
    view = make_views(shape, strong="none" if kind == "weak" else kind).strong
    images = pictures(channels, height, width, count=6, seed=seed)
    result = view(images, sampling.sample_keys(seed, 6))
    assert result.shape == images.shape
    assert bool(result.isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ALL_VIEWS)
def test_gpu_makes_the_same_views_as_the_cpu(kind: str) -> None:
    images, keys, view = pictures(count=200), sampling.sample_keys(13, 200), view_of(kind)
    assert torch.equal(view(images.cuda(), keys.cuda()).cpu(), view(images, keys))


def test_normalize_scales_subtracts_and_divides_per_channel() -> None:
    images = pictures()
    expected = (images.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    result = Normalize(MEAN, STD)(images, torch.zeros(0, dtype=torch.int64))
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=0)


def test_views_refuse_images_that_are_not_uint8() -> None:
    with pytest.raises(TypeError, match="uint8"):
        view_of("weak")(pictures().float(), sampling.sample_keys(0, 12))


@pytest.mark.parametrize(
    ("name", "side", "flip", "padding"),
    [
        ("cifar10", 32, True, 4),
        ("cifar100", 32, True, 4),
        ("stl10", 96, True, 12),
        ("fashion_mnist", 28, True, 3),
        ("svhn", 32, False, 4),
        ("mnist", 28, False, 2),
        ("emnist", 28, False, 3),
        ("digits", 8, False, 1),
    ],
)
def test_weak_view_by_data_set(name: str, side: int, flip: bool, padding: int) -> None:
    (stage,) = weak_stages(spec(name, 3, side))
    assert isinstance(stage, FlipCrop)
    assert (stage.flip, stage.padding) == (flip, padding)


def test_weak_view_can_be_chosen() -> None:
    (crop,) = weak_stages(spec("cifar10"), "crop")
    (flipped,) = weak_stages(spec("svhn"), "flip_crop")
    assert isinstance(crop, FlipCrop)
    assert isinstance(flipped, FlipCrop)
    assert (crop.flip, flipped.flip) == (False, True)


def pool_of(name: str, strong: str) -> tuple[Pool, list[type]]:
    stages = strong_stages(spec(name), strong)
    assert isinstance(stages[0], RandAugment)
    return stages[0].pool, [type(stage) for stage in stages]


@pytest.mark.parametrize("name", ["digits", "mnist", "emnist"])
def test_automatic_strong_view_of_digits_preserves_labels(name: str) -> None:
    pool, _ = pool_of(name, "auto")
    assert pool is DIGITS
    assert not {"Invert", "Solarize", "Equalize", "Color"} & {operation.name for operation in pool.operations}


def test_strong_view_by_name() -> None:
    assert pool_of("cifar10", "auto") == (FIXMATCH, [RandAugment, Cutout])
    assert pool_of("svhn", "auto") == (FIXMATCH, [RandAugment, Cutout])
    assert pool_of("mnist", "fixmatch") == (FIXMATCH, [RandAugment, Cutout])
    assert pool_of("cifar10", "semifl") == (SEMIFL, [RandAugment])
    assert [len(pool.operations) for pool in (FIXMATCH, SEMIFL)] == [14, 15]


def test_views_without_augmentation_are_plain() -> None:
    views = make_views(spec(), weak="none", strong="none")
    images, keys = pictures(), sampling.sample_keys(0, 12)
    assert torch.equal(views.weak(images, keys), views.plain(images, keys))
    assert torch.equal(views.strong(images, keys), views.plain(images, keys))


def test_strong_none_is_the_weak_view() -> None:
    views = make_views(spec(), strong="none")
    assert views.strong is views.weak


@pytest.mark.parametrize(("key", "known"), [("weak", "flip_crop"), ("strong", "semifl")])
def test_unknown_view_names_the_key_and_the_choices(key: str, known: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{key}: unknown view 'randaug'; .*{known}"):
        make_views(spec(), **dict[str, Any]({key: "randaug"}))


def test_strong_view_crops_independently_of_the_weak_view_with_the_same_key() -> None:
    none = Pool((Operation("Identity"),), magnitudes=(1,))
    normalize, crop = Normalize(MEAN, STD), FlipCrop(True, 4)
    weak, strong = View([crop], normalize), View([crop, RandAugment(none)], normalize, first_draw=crop.draws)
    images, keys = pictures(count=60), sampling.sample_keys(14, 60)
    same = (weak.augment(images, keys) == strong.augment(images, keys)).flatten(1).all(1)
    assert same.float().mean() < 0.3


@pytest.mark.parametrize(("side", "largest"), [(8, 2), (28, 7)])
def test_digits_cutout_is_black_and_at_most_a_quarter_of_the_side(side: int, largest: int) -> None:
    white = torch.full((300, 1, side, side), 255, dtype=torch.uint8)
    cutout = strong_stages(spec("digits", 1, side), "digits")[1]
    holes = cutout(white, sampling.uniform(sampling.sample_keys(15, 300), 2)) == 0
    assert int(holes.any(2).sum(2).max()) == largest
    assert int(holes.any(3).sum(2).max()) == largest


def test_fixmatch_cutout_is_half_the_side() -> None:
    grey = Cutout(16)(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.tensor([[0.5, 0.5]])) == 127
    assert int(grey[0, 0].any(0).sum()) == 17  # the end is included
    assert FIXMATCH.cutout is not None
    assert [FIXMATCH.cutout((side, side)) for side in (28, 32, 96)] == [14, 16, 48]


def test_pool_is_extended_by_data_alone() -> None:
    upside_down = Operation("Turn", kernels.affine_nearest, lambda v, size: kernels.rotation(180 * v, size))
    pool = Pool((upside_down,), magnitudes=(1,), count=1, probability=1.0)
    images = pictures()
    assert torch.equal(RandAugment(pool)(images, torch.full((12, 6), 0.5)), images.rot90(2, (2, 3)))


@pytest.mark.parametrize("kind", ALL_VIEWS)
def test_view_survives_pickling(kind: str) -> None:
    images, keys, view = pictures(), sampling.sample_keys(16, 12), view_of(kind)
    assert torch.equal(pickle.loads(pickle.dumps(view))(images, keys), view(images, keys))


def test_fedmatch_draws_six_operations_at_magnitudes_below_the_image_s_own_number() -> None:
    draws = torch.rand(40_000, 37, generator=torch.Generator().manual_seed(0))
    augment = RandAugment(FEDMATCH)
    assert augment.draws == 37
    seen: list[torch.Tensor] = []
    augment.apply = lambda images, codes, places: seen.append(codes) or images  # type: ignore[func-returns-value,method-assign]
    augment(torch.zeros(40_000, 1, 1, 1, dtype=torch.uint8), draws)
    assert len(seen) == 6
    codes = torch.stack(seen, 1)
    operation, level = codes // 10, codes % 10 // 2
    assert torch.bincount(operation.flatten(), minlength=14)[:13].div(240_000).sub(1 / 13).abs().max() < 0.003
    assert int(operation.max()) == 12
    number = 2 + (draws[:, -1] * 4).floor()
    assert (level < number[:, None]).all()
    expected = torch.tensor([(1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4] * 2 + [(1 / 3 + 1 / 4 + 1 / 5) / 4, 9 / 80, 1 / 20])
    assert torch.bincount(level.flatten()).div(240_000).sub(expected).abs().max() < 0.005


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
