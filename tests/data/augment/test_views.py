"""Weak and strong views by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedssl import sampling
from lightning_fedssl.data.augment.randaugment import FIXMATCH, Operation, Pool, RandAugment
from lightning_fedssl.data.augment.views import FlipCrop, Normalize, View, make_views, weak_stages
from tests.data.augment.helpers import MEAN, STD, pictures, spec

ALL_VIEWS = ["weak", "fixmatch", "semifl", "digits", "fedmatch"]


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


def by_name(data: Any, kind: str) -> Any:
    return make_views(data, strong="none" if kind == "weak" else kind).strong


def view_of(kind: str, channels: int = 3, side: int = 32) -> View:
    view = by_name(spec(channels=channels, side=side), kind)
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
def test_empty_batch_stays_empty(kind: str) -> None:
    images = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    assert view_of(kind)(images, torch.zeros(0, dtype=torch.int64)).shape == (0, 3, 32, 32)
    assert RandAugment(FIXMATCH, static=True)(images, torch.zeros(0, 12)).shape == (0, 3, 32, 32)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL_VIEWS), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(0, 99))
def test_any_image_size_works(kind: str, height: int, width: int, channels: int, seed: int) -> None:
    view = by_name(spec("x", channels, height, width), kind)
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


def test_views_without_augmentation_are_plain() -> None:
    views = make_views(spec(), weak="none", strong="none")
    images, keys = pictures(), sampling.sample_keys(0, 12)
    assert torch.equal(views.weak(images, keys), views.plain(images, keys))
    assert torch.equal(views.strong(images, keys), views.plain(images, keys))


def test_strong_view_crops_independently_of_the_weak_view_with_the_same_key() -> None:
    none = Pool((Operation("Identity"),), magnitudes=(1,))
    normalize, crop = Normalize(MEAN, STD), FlipCrop(True, 4)
    weak, strong = View([crop], normalize), View([crop, RandAugment(none)], normalize, first_draw=crop.draws)
    images, keys = pictures(count=60), sampling.sample_keys(14, 60)
    same = (weak.augment(images, keys) == strong.augment(images, keys)).flatten(1).all(1)
    assert same.float().mean() < 0.3
