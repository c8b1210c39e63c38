"""Draws of RandAugment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.augment import randaugment
from lightning_fedssl.data.augment.randaugment import DIGITS, FEDMATCH, FIXMATCH, SEMIFL, Pool, RandAugment
from lightning_fedssl.data.augment.views import FlipCrop, strong_stages
from tests.data.augment.helpers import pictures, spec


def chi_square(counts: Tensor) -> float:
    expected = counts.double().mean()
    return float(((counts.double() - expected) ** 2 / expected).sum())


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


@pytest.mark.parametrize(("side", "largest"), [(8, 2), (28, 7)])
def test_digits_cutout_is_black_and_at_most_a_quarter_of_the_side(side: int, largest: int) -> None:
    white = torch.full((300, 1, side, side), 255, dtype=torch.uint8)
    cutout = strong_stages(spec("digits", 1, side), "digits")[1]
    holes = cutout(white, sampling.uniform(sampling.sample_keys(15, 300), 2)) == 0
    assert int(holes.any(2).sum(2).max()) == largest
    assert int(holes.any(3).sum(2).max()) == largest


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
