"""Networks of Semi-SFL, and cutting networks in two."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from lightning_fedssl.models import CNN, MLP, SVHNCNN, VGG11, VGG16, AlexNet, ResNet9, ResNet18
from lightning_fedssl.models.split import split


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("network", "at", "shape", "bottom", "top", "features"),
    [
        (SVHNCNN, 2, (3, 32, 32), 53_696, 824_842, 1600),
        (AlexNet, 5, (3, 32, 32), 2_251_584, 33_603_594, 4096),
        (VGG16, 13, (3, 144, 144), 14_723_136, 69_623_908, 12_800),
    ],
)
def test_published_networks_have_the_published_sizes(
    network: type[nn.Module], at: int, shape: tuple[int, int, int], bottom: int, top: int, features: int
) -> None:
    parts = split(network(), at)
    assert (count(parts.bottom), count(parts.top)) == (bottom, top)
    with torch.no_grad():
        assert parts.eval().bottom(torch.zeros(1, *shape)).numel() == features


@pytest.mark.parametrize(
    ("network", "shape", "splits"),
    [
        (SVHNCNN(10, (1, 28, 28)), (1, 28, 28), 4),
        (AlexNet(10, (1, 8, 8), width=2), (1, 8, 8), 8),
        (VGG16(10, (3, 16, 16), width=2), (3, 16, 16), 16),
        (VGG11(10, (3, 32, 32), width=2, norm="batch"), (3, 32, 32), 9),
        (CNN(10, (1, 8, 8), width=4), (1, 8, 8), 4),
        (MLP(10, (1, 8, 8), hidden=(5, 4)), (1, 8, 8), 3),
        (MLP(3, (6,), hidden=(5, 4)), (6,), 3),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 5), nn.ReLU()), nn.Linear(5, 3)), (1, 8, 8), 2),
    ],
)
def test_every_split_is_the_network_itself(network: nn.Module, shape: tuple[int, ...], splits: int) -> None:
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    network.eval()
    for at in range(1, splits):
        parts = split(network, at)
        assert torch.equal(parts(x), network(x))
        assert {id(p) for p in parts.parameters()} == {id(p) for p in network.parameters()}
        heavy = [p for p in parts.bottom.parameters() if p.dim() > 1]
        assert len(heavy) == at


def test_a_residual_network_is_split_between_its_layers_and_residual_pairs() -> None:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    network = ResNet9(10, (3, 32, 32), width=2, norm="batch").eval()
    for at in range(1, 7):
        parts = split(network, at)
        assert torch.equal(parts(x), network(x))
        assert {id(p) for p in parts.parameters()} == {id(p) for p in network.parameters()}
    bottom = [name for name, _ in split(network, 5).bottom.named_children()]
    assert bottom == ["conv1", "conv2", "pool2", "residual1", "conv3", "pool3", "conv4", "pool4"]
    with pytest.raises(ValueError, match=r"5 \(pool4\), 6 \(pool\)"):
        split(network, 7)


def test_the_bottom_has_the_norm_activation_and_pooling_of_its_last_layer_and_no_dropout() -> None:
    bottom = split(AlexNet(10, (3, 32, 32), width=2), 6).bottom
    assert [type(layer).__name__ for layer in bottom.children()][-3:] == ["Dropout", "Linear", "ReLU"]
    bottom = split(VGG16(10, (3, 32, 32), width=2), 2).bottom
    assert [type(layer).__name__ for layer in bottom.children()][-4:] == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    top = split(AlexNet(10, (3, 32, 32), width=2), 5).top
    assert [type(layer).__name__ for layer in top.children()][:3] == ["Flatten", "Dropout", "Linear"]


def test_a_split_by_name_ends_with_that_layer() -> None:
    parts = split(AlexNet(10, (3, 32, 32), width=2), "features.3")
    assert [type(layer).__name__ for layer in parts.bottom.children()] == ["Conv2d", "ReLU", "MaxPool2d", "Conv2d"]
    assert len(cast(nn.Sequential, split(CNN(10, (1, 8, 8), width=4), "2").bottom)) == 8


@pytest.mark.parametrize("at", [0, -1, 4, "features.99", "classifier.3"])
def test_a_split_out_of_range_is_refused_with_the_possible_ones(at: int | str) -> None:
    with pytest.raises(ValueError, match=r"model.split is .*1 \(features.2\), 2 \(features.5\), 3 \(classifier.2\)"):
        split(SVHNCNN(10, (1, 28, 28)), at)


class Shifted(MLP):
    """More than its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Residual(nn.Sequential):
    """More than its layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = input + super().forward(input)  # type: ignore[no-untyped-call]
        return total


@pytest.mark.parametrize("network", [ResNet18(10, (3, 32, 32), width=4), Shifted(3, (4,)), Residual(nn.Linear(4, 4))])
def test_a_network_that_is_no_sequence_is_refused(network: nn.Module) -> None:
    with pytest.raises(ValueError, match=r" is not a sequence of layers.*AlexNet"):
        split(network, 1)


def test_a_block_with_a_forward_pass_of_its_own_is_one_layer() -> None:
    network = nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3))
    x = torch.randn(2, 4)
    assert torch.equal(split(network, 1)(x), network(x))


@pytest.mark.parametrize(
    ("network", "shape", "least"),
    [(SVHNCNN, (3, 15, 32), "16 x 16"), (AlexNet, (3, 7, 7), "8 x 8"), (VGG16, (3, 8, 8), "16 x 16")],
)
def test_images_that_are_too_small_are_refused(
    network: type[nn.Module], shape: tuple[int, int, int], least: str
) -> None:
    with pytest.raises(ValueError, match=f"from {least} pixels up"):
        network(in_shape=shape)


def test_a_layer_that_is_applied_twice_is_in_both_parts() -> None:
    activation = nn.ReLU()
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 3))
    parts = split(network, 1)
    assert [type(layer) for layer in parts.bottom.children()] == [nn.Flatten, nn.Linear, nn.ReLU]
    images = torch.randn(5, 1, 4, 4)
    assert torch.equal(parts(images), network(images))
