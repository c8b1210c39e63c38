from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor, nn

from lightning_fedssl.models import CNN, MLP, NetworkFactory, WideResNet, build_network


class UserNet(nn.Module):
    """A user's module whose first parameter is its own."""

    def __init__(self, width: int = 3, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x).mean((2, 3)))
        return logits


class TenClasses(nn.Module):
    """A user's module without any parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


class RequiredClasses(nn.Module):
    """A user's module that cannot be made without the data's facts."""

    def __init__(self, in_shape: tuple[int, int, int], width: int, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(in_shape[0] * in_shape[1] * in_shape[2], width))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.net(x))
        return logits


class WiderCNN(CNN):
    """A user's network derived from ours, passing the rest on."""

    def __init__(self, factor: int = 2, **kwargs: Any) -> None:
        super().__init__(width=4 * factor, **kwargs)


class Pair(nn.Module):
    """A module with two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def user_function(width: int = 3, num_classes: int = 10) -> UserNet:
    """A user's function that makes a module."""
    return UserNet(width, num_classes)


class Holder:
    """Stands for an algorithm: it takes a network."""

    def __init__(self, network: NetworkFactory = CNN, lr: float = 0.1) -> None:
        self.network: Any = network


def configured(network: Any) -> Callable[..., nn.Module]:
    """What an algorithm is given for ``model.init_args.network: ...``, after a round trip through saved YAML."""
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(Holder, "model", required=True)
    arguments = {} if network is None else {"network": network}
    first = parser.parse_object({"model": {"class_path": f"{__name__}.Holder", "init_args": arguments}})
    config = parser.parse_string(parser.dump(first))
    factory: Callable[..., nn.Module] = parser.instantiate(config).model.network
    return factory


def path(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": name if "." in name else f"{__name__}.{name}", "init_args": init_args}


@pytest.mark.parametrize("network", ["MLP", "CNN", "WideResNet", "ResNet9", "ResNet18"])
def test_bare_names_are_ours_and_take_classes_and_shape_from_the_data(network: str) -> None:
    built = build_network(configured(network), num_classes=7, in_shape=(1, 8, 8))
    assert type(built).__module__.startswith("lightning_fedssl.models")
    assert type(built).__name__ == network
    assert built(torch.zeros(2, 1, 8, 8)).shape == (2, 7)


def test_a_default_network_needs_no_configuration() -> None:
    assert isinstance(build_network(configured(None), 7, (1, 8, 8)), CNN)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ({"class_path": "MLP", "init_args": {"hidden": [5, 4]}}, MLP),
        ({"class_path": "CNN", "init_args": {"num_classes": 7, "width": 4}}, CNN),
        (f"{__name__}.UserNet", UserNet),
        (path("UserNet", width=5), UserNet),
        (path("UserNet", num_classes=7), UserNet),
        (path("RequiredClasses", width=5), RequiredClasses),
        (path("WiderCNN", factor=3), WiderCNN),
        (f"{__name__}.user_function", UserNet),
        (path("user_function", width=5, num_classes=7), UserNet),
    ],
    ids=str,
)
def test_classes_and_functions_from_a_configuration(network: Any, expected: type[nn.Module]) -> None:
    built = build_network(configured(network), num_classes=7, in_shape=(3, 8, 8))
    assert isinstance(built, expected)
    assert built(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def test_torchvision_functions() -> None:
    pytest.importorskip("torchvision")
    name = "torchvision.models.squeezenet1_1"
    for network in (name, path(name, num_classes=7)):
        built = build_network(configured(network), num_classes=7, in_shape=(3, 32, 32))
        assert built(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(ValueError, match=r"SqueezeNet gave \(2, 1000\).*Set num_classes: 7"):
        build_network(configured(path(name)), num_classes=7, in_shape=(3, 32, 32))


def test_timm_functions_and_partials() -> None:
    timm = pytest.importorskip("timm")
    by_path = {"class_path": "timm.create_model", "init_args": {"model_name": "test_resnet"}}
    by_path["dict_kwargs"] = {"num_classes": 7, "in_chans": 1}
    for factory in (configured(by_path), functools.partial(timm.create_model, "test_resnet", in_chans=1)):
        assert build_network(factory, 7, (1, 32, 32))(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_a_network_without_parameters_for_classes_is_taken_if_it_fits() -> None:
    built = build_network(configured(f"{__name__}.TenClasses"), 10, (1, 8, 8))
    assert sum(p.numel() for p in built.parameters()) == 650  # the check has also given the lazy layer its shape
    with pytest.raises(ValueError, match=r"TenClasses gave \(2, 10\) for two samples of shape \(1, 8, 8\)"):
        build_network(TenClasses, 3, (1, 8, 8))


@pytest.mark.parametrize("make", [lambda net: net, lambda net: lambda **sizes: net])
def test_a_built_module_and_what_a_function_returns_are_copied(make: Callable[[nn.Module], Any]) -> None:
    module = UserNet(num_classes=7)
    first, second = (build_network(make(module), 7, (3, 8, 8)) for _ in range(2))
    pointers = [{p.data_ptr() for p in net.parameters()} for net in (module, first, second)]
    assert len(set.union(*pointers)) == 3 * len(pointers[0])


def test_a_contradiction_with_the_data_is_named() -> None:
    network = configured({"class_path": "MLP", "init_args": {"num_classes": 5}})
    with pytest.raises(ValueError, match=r"model\.network has num_classes 5, but the data have 7 classes\. Leave"):
        build_network(network, 7, (1, 8, 8))


def test_images_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.network: Conv2d cannot take samples of shape \(1, 8, 8\): .*in_ch"):
        build_network(nn.Conv2d(3, 4, 3), 7, (1, 8, 8))


def test_an_output_that_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"model\.network: Pair gave tuple"):
        build_network(Pair, 7, (1, 8, 8))


def test_the_check_draws_nothing_and_changes_nothing() -> None:
    torch.manual_seed(0)
    reference = WideResNet(depth=10, norm="batch")
    after = torch.get_rng_state()
    torch.manual_seed(0)
    built = build_network(functools.partial(WideResNet, depth=10, norm="batch"), 10, (3, 32, 32))
    assert torch.equal(torch.get_rng_state(), after)
    assert built.training
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in built.state_dict().items())
