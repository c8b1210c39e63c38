"""Views of one's own, and the shipped views of signals and tables."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FixMatch
from lightning_fedssl.data import (
    BreastCancer,
    Compose,
    FeatureMask,
    FederatedDataModule,
    GaussianNoise,
    PerSample,
    Scaling,
    TimeMask,
)
from lightning_fedssl.data.augment.custom import adapt
from lightning_fedssl.models import MLP
from tests.data.helpers import federation, own, samples, set_up
from tests.toy import assert_same, toy_trainer, weights


def test_the_stored_values_stay_as_they_are() -> None:
    data = federation((5,), weak=Scaling(), validation=0)
    data.setup()
    local, rows = data.local_data(0, 1), torch.arange(60)
    before = local.images.clone()
    for view in (local.plain, partial(local.weak, purpose="a"), partial(local.strong, purpose="a")):
        view(rows)
    assert torch.equal(local.images, before)
    assert torch.equal(before, samples((5,)).tensors[0])


SHIPPED = [GaussianNoise(), Scaling(), TimeMask(), FeatureMask(), Compose([Scaling(), TimeMask()])]


@pytest.mark.parametrize("view", SHIPPED, ids=lambda view: type(view).__name__)
def test_a_shipped_view_of_a_sample_depends_on_it_and_its_key_alone(view: Any) -> None:
    x, keys = torch.randn(7, 2, 30), sampling.sample_keys(3, 7)
    batch = view(x, keys)
    assert batch.shape == x.shape
    assert not torch.equal(batch, x)
    for row in range(7):
        assert torch.equal(view(x[row : row + 1], keys[row : row + 1])[0], batch[row])


def test_shipped_views_do_what_they_say() -> None:
    keys, ones = sampling.sample_keys(1, 4000), torch.ones(4000, 1, 10)
    noise = GaussianNoise(0.5)(ones, keys) - 1
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 0.5) < 0.01
    factors = Scaling(0.2)(ones, keys)[:, 0]
    assert torch.equal(factors, factors[:, :1].expand(-1, 10))
    assert 0.8 <= float(factors.min()) < 0.81
    assert 1.19 < float(factors.max()) <= 1.2
    hidden = TimeMask(0.3)(ones, keys)[:, 0] == 0
    assert torch.equal(hidden.sum(1), torch.full((4000,), 3))
    assert torch.equal(hidden.int().diff(dim=1).abs().sum(1).clamp(max=2), hidden.int().diff(dim=1).abs().sum(1))
    assert abs(float((FeatureMask(0.3)(ones, keys) == 0).double().mean()) - 0.3) < 0.01


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("view", [GaussianNoise, Scaling, TimeMask, FeatureMask])
def test_shipped_views_refuse_senseless_numbers(view: Any, value: float) -> None:
    with pytest.raises(ValueError, match=f"{view.__name__} is {value}: give a finite number"):
        view(value)


def test_a_torchvision_transform_is_seeded_by_the_key() -> None:
    from torchvision.transforms import v2

    view, keys = adapt(v2.RandomHorizontalFlip()), sampling.sample_keys(5, 40)
    x = torch.arange(40 * 4.0).view(40, 1, 1, 4)
    flipped = (view(x, keys) != x).flatten(1).any(1)
    assert 5 < int(flipped.sum()) < 35
    assert torch.equal((view(x[20:], keys[20:]) != x[20:]).flatten(1).any(1), flipped[20:])
    state = torch.get_rng_state()
    view(x, keys)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda x: x + torch.randn_like(x), "depends on more than the sample and its key"),
        (lambda x: x - x.mean(0), "depends on more than the sample and its key"),
        (lambda x: x[:, :1], "finite floating numbers of the same shape"),
        (lambda x: x / 0, "finite floating numbers of the same shape"),
    ],
)
def test_unusable_views_are_refused(view: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"data.strong: .*{message}"):
        federation((4,), strong=view).setup()


def test_missing_views_of_ones_own_data_are_refused_in_one_line_with_both_keys() -> None:
    grey = TensorDataset(torch.randint(256, (30, 1, 8, 8), dtype=torch.uint8), torch.arange(30) % 2)
    made = (
        lambda: FederatedDataModule(BreastCancer()),
        lambda: FederatedDataModule.from_datasets(grey, grey, weak="auto", strong="auto"),
    )
    for make in made:
        with pytest.raises(ValueError, match=r"data\.weak is auto and data\.strong auto, but .* give both") as caught:
            make()  # type: ignore[no-untyped-call]
        assert "\n" not in str(caught.value)


def test_named_views_are_for_images_of_one_or_three_channels() -> None:
    four = TensorDataset(torch.randint(256, (30, 4, 8, 8), dtype=torch.uint8), torch.arange(30) % 2)
    three = TensorDataset(four.tensors[0][:, :3], four.tensors[1])
    FederatedDataModule.from_datasets(four, four, weak="crop", strong="none")
    made = (
        lambda: FederatedDataModule.from_datasets(four, four, weak="crop", strong="fixmatch"),
        lambda: federation(weak="flip_crop"),
    )
    for make in made:
        with pytest.raises(ValueError, match="are views of 8-bit images of 1 or 3 channels"):
            make()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="follows a named weak view"):
        FederatedDataModule.from_datasets(three, three, weak=GaussianNoise(), strong="fixmatch")


def test_a_view_of_images_gets_pixels_from_0_to_1() -> None:
    images = torch.full((30, 1, 4, 4), 51, dtype=torch.uint8)
    images[0] = 255
    pair = TensorDataset(images, torch.arange(30) % 2)
    seen: list[float] = []

    def view(x: Tensor) -> Tensor:
        seen.append(float(x.max()))
        return x

    data = set_up(own(pair), weak=view)
    local, rows = data.local_data(0, 1), torch.arange(1, 4)
    torch.testing.assert_close(local.weak(rows, "x"), local.plain(rows))
    assert seen[-1] == pytest.approx(0.2)


def test_a_view_of_images_computes_in_the_type_of_the_training() -> None:
    images = torch.arange(30 * 16).remainder(256).to(torch.uint8).view(30, 1, 4, 4)
    pair = TensorDataset(images, torch.arange(30) % 2)
    data, rows = set_up(own(pair), weak=lambda x: x, strong=lambda x: x), torch.arange(30)
    exact = data.local_data(0, 1, torch.float64)
    for view in (exact.weak, exact.strong):  # rounded to 32 bits, they differ by about 1e-7
        torch.testing.assert_close(view(rows, "x"), exact.plain(rows), rtol=0, atol=1e-14)
    assert data.local_data(0, 1).weak(rows, "x").dtype == torch.float32


def jitter(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def batched(x: Tensor, keys: Tensor) -> Tensor:
    return GaussianNoise(0.3)(x, keys)


def own_views() -> FederatedDataModule:
    """One view of each kind: a transform of a sample, and a function of a batch and keys."""
    return federation(weak=PerSample(jitter), strong=batched, num_clients=4)


def fit(folder: Path, **settings: Any) -> dict[str, Tensor]:
    algorithm = FixMatch(network=partial(MLP, hidden=(8,)), threshold=0.3, server_epochs=1)
    resume = settings.pop("ckpt_path", None)
    torch.manual_seed(len(folder.name))  # the global generator plays no part
    toy_trainer(folder, precision="64-true", **settings).fit(algorithm, own_views(), ckpt_path=resume)
    return weights(algorithm)


def test_views_of_ones_own_draw_the_same_after_resuming_and_in_both_local_trainers(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", max_rounds=4)
    fit(tmp_path / "first half", max_rounds=2)
    (last,) = (tmp_path / "first half").rglob("last.ckpt")
    assert_same(whole, fit(tmp_path / "second half", max_rounds=4, ckpt_path=str(last)))
    stacked = fit(tmp_path / "stacked", max_rounds=4, clients_at_once=3)
    for name in whole:
        torch.testing.assert_close(whole[name], stacked[name], rtol=1e-10, atol=1e-10)
