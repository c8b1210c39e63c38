from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.models import (
    CNN,
    EMNISTCNN,
    MLP,
    VGG11,
    Network,
    NormKind,
    ResNet8,
    ResNet9,
    ResNet18,
    WideResNet,
)
from lightning_fedssl.models.layers import num_groups

NORMS: tuple[NormKind, ...] = get_args(NormKind)
SMALL: dict[str, Callable[..., Network]] = {
    "CNN": partial(CNN, width=4),
    "WideResNet": partial(WideResNet, depth=10, widen_factor=1),
    "ResNet9": partial(ResNet9, width=4),
    "ResNet8": partial(ResNet8, width=4),
    "ResNet18": partial(ResNet18, width=4),
}


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# Published forms


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (lambda: WideResNet(depth=28, widen_factor=2, norm="static_batch"), 1_467_610),
        (lambda: WideResNet(num_classes=100, depth=28, widen_factor=8), 23_401_012),
        (ResNet8, 1_227_594),
        (lambda: ResNet18(norm="group"), 11_173_962),
        (lambda: ResNet18(norm="batch"), 11_173_962),
        (lambda: ResNet9(norm="group"), 6_575_370),
        (lambda: ResNet9(norm="none", bias=False), 6_568_640),
        (lambda: MLP(in_shape=(1, 28, 28)), 199_210),
        (lambda: MLP(in_shape=(1, 28, 28), hidden=(5000,)), 3_975_010),
        (lambda: MLP(num_classes=3, in_shape=(1, 2, 2), hidden=()), 15),
        (partial(EMNISTCNN, norm="none"), 1_204_655),
        (partial(EMNISTCNN, norm="group"), 1_204_847),
        (VGG11, 9_231_114),
        (partial(VGG11, norm="batch"), 9_231_114),
        (lambda: CNN(in_shape=(1, 8, 8), width=2, norm="none"), 2 * 10 + 4 * 19 + 8 * 37 + 10 * 9),
    ],
)
def test_number_of_parameters(factory: Callable[[], nn.Module], expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(factory()) == expected


@pytest.mark.parametrize(("side", "depth"), [(8, 3), (32, 3), (48, 4), (64, 4), (224, 6)])
def test_a_cnn_without_a_depth_has_more_convolutions_for_larger_images(side: int, depth: int) -> None:
    network = CNN(in_shape=(1, side, side), width=2, num_classes=4, depth=None)
    assert len(network.convs) == depth
    assert network(torch.zeros(2, 1, side, side)).shape == (2, 4)


def test_fedmatch_resnet9_has_nine_tensors() -> None:
    assert len(list(ResNet9(norm="none", bias=False, width=4).parameters())) == 9


def test_wide_resnet_starts_kaiming_normal_over_fan_out_with_zero_bias() -> None:
    torch.manual_seed(0)
    network = WideResNet(depth=10, widen_factor=2)
    last: Any = network.blocks[-1]
    weight = last.conv2.weight
    assert weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)
    assert network.classifier.bias.count_nonzero() == 0
    assert network.classifier.weight.abs().max().item() <= 128**-0.5
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)


def test_wide_resnet_block_is_pre_activation() -> None:
    """The 1x1 convolution takes the activated input, the identity the plain one."""
    torch.manual_seed(0)
    block: Any = WideResNet(depth=10, widen_factor=2, norm="none").blocks[0]
    x = torch.randn(2, 16, 5, 5)
    a = x.relu()
    assert torch.equal(block(x), block.conv2(block.conv1(a).relu()) + block.shortcut(a))
    same: Any = WideResNet(depth=16, widen_factor=2, norm="none").blocks[1]
    x = torch.randn(2, 32, 5, 5)
    assert same.shortcut is None
    assert torch.equal(same(x), same.conv2(same.conv1(x.relu()).relu()) + x)


def test_resnet18_strides_and_projections() -> None:
    network = ResNet18(width=32)
    blocks: Any = list(network.blocks)
    assert [block.conv1.stride[0] for block in blocks] == [1, 1, 2, 1, 2, 1, 2, 1]
    assert [index for index, block in enumerate(blocks) if not isinstance(block.shortcut, nn.Identity)] == [2, 4, 6]
    groups = [module.num_groups for module in network.modules() if isinstance(module, nn.GroupNorm)]
    assert groups == [32] * 20


def test_resnet9_pools_the_last_map_to_one_pixel_as_published() -> None:
    network = ResNet9(width=4).eval()
    seen: list[Tensor] = []
    network.residual2.register_forward_hook(lambda module, args, output: seen.append(args[0] + output))
    logits = network(torch.randn(2, 3, 32, 32))
    assert seen[0].shape[-2:] == (4, 4)
    assert torch.equal(logits, network.classifier(nn.functional.max_pool2d(seen[0], 4).flatten(1)))


# Shapes, gradients, initialisation


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_parameter(name: str, norm: NormKind) -> None:
    torch.manual_seed(0)
    network = SMALL[name](norm=norm)
    network(torch.randn(4, 3, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.count_nonzero() > 0 for p in network.parameters())
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", SMALL)
def test_weights_are_a_function_of_the_global_seed(name: str) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(SMALL[name]().parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


# Normalisation


@pytest.mark.parametrize("name", SMALL)
def test_norm_groups_reach_every_group_norm(name: str) -> None:
    """Two channels and more in a group, where 32 groups would be instance norm for layers of up to 32 channels."""
    network = SMALL[name](norm="group", norm_groups=2)
    layers = [module for module in network.modules() if isinstance(module, nn.GroupNorm)]
    assert layers
    assert {layer.num_groups for layer in layers} == {2}
    default = [m.num_groups for m in SMALL[name](norm="group").modules() if isinstance(m, nn.GroupNorm)]
    assert default == [num_groups(layer.num_channels) for layer in layers]


def test_vgg_averages_the_maps_of_larger_images() -> None:
    assert VGG11(in_shape=(3, 96, 96), width=4)(torch.zeros(2, 3, 96, 96)).shape == (2, 10)
