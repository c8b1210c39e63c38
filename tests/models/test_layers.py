from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from lightning_fedssl.models import NormKind, StaticBatchNorm2d, make_norm
from lightning_fedssl.models.layers import num_groups
from lightning_fedssl.models.network import MaxPool2d, max_pool

NORMS: tuple[NormKind, ...] = get_args(NormKind)


@pytest.mark.parametrize("shape", [(3, 2, 8, 8), (2, 3, 5, 7), (1, 1, 2, 3), (0, 2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_max_pooling_is_torch_s_with_and_without_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).relu().to(dtype)  # with equal neighbours
    x[..., :1, 1] = torch.nan
    for images in (x, x.to(memory_format=torch.channels_last), x.transpose(-1, -2)):
        expected = nn.functional.max_pool2d(images, 2)
        with torch.no_grad():
            for found in (max_pool(images), MaxPool2d()(images)):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                assert found.stride() == expected.stride()
    leaf = torch.randn(4, 2, 6, 6).relu().requires_grad_()
    gradients = [torch.autograd.grad(pool(leaf).square().sum(), leaf)[0] for pool in (max_pool, MaxPool2d())]
    expected = torch.autograd.grad(nn.functional.max_pool2d(leaf, 2).square().sum(), leaf)[0]
    assert all(torch.equal(gradient, expected) for gradient in gradients)


def test_norm_kinds() -> None:
    kinds = [type(make_norm(norm, 8)) for norm in NORMS]
    assert kinds == [nn.BatchNorm2d, StaticBatchNorm2d, nn.GroupNorm, nn.Identity]
    with pytest.raises(ValueError, match=r"norm is 'layer'; choose batch, static_batch, group or none"):
        make_norm("layer", 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (512, 32), (32, 32), (16, 16), (48, 24), (4, 4), (37, 1)])
def test_groups_divide_the_channels(channels: int, groups: int) -> None:
    assert num_groups(channels) == groups


def test_static_batch_norm_trains_with_batch_statistics_and_never_writes_its_buffers() -> None:
    layer = StaticBatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    expected = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert layer.running_mean.tolist() == [0, 0, 0]
    assert layer.running_var.tolist() == [1, 1, 1]
    assert sorted(layer.state_dict()) == ["bias", "running_mean", "running_var", "weight"]


def test_static_batch_norm_evaluates_with_mean_0_and_variance_1_until_they_are_set() -> None:
    layer = StaticBatchNorm2d(2).eval()
    x = torch.randn(2, 2, 3, 3)
    assert torch.allclose(layer(x), x / (1 + 1e-5) ** 0.5)
    layer.running_mean.fill_(1.0)
    layer.running_var.fill_(4.0)
    assert torch.allclose(layer(x), (x - 1) / (4 + 1e-5) ** 0.5)
