from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor, nn

from lightning_fedssl.models import (
    CNN,
    MLP,
    Network,
    NetworkFactory,
    NormKind,
    ResNet9,
    ResNet18,
    StaticBatchNorm2d,
    WideResNet,
    build_network,
    make_norm,
)
from lightning_fedssl.models.norm import BatchNorm2d, num_groups
from lightning_fedssl.models.pooling import MaxPool2d, max_pool

NORMS: tuple[NormKind, ...] = get_args(NormKind)
SMALL: dict[str, Callable[..., Network]] = {
    "CNN": functools.partial(CNN, width=4),
    "WideResNet": functools.partial(WideResNet, depth=10, widen_factor=1),
    "ResNet9": functools.partial(ResNet9, width=4),
    "ResNet18": functools.partial(ResNet18, width=4),
}


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# Published forms


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (lambda: WideResNet(depth=28, widen_factor=2, norm="static_batch"), 1_467_610),
        (lambda: WideResNet(num_classes=100, depth=28, widen_factor=8), 23_401_012),
        (lambda: ResNet18(norm="group"), 11_173_962),
        (lambda: ResNet18(norm="batch"), 11_173_962),
        (lambda: ResNet9(norm="group"), 6_575_370),
        (lambda: ResNet9(norm="none", bias=False), 6_568_640),
        (lambda: MLP(in_shape=(1, 28, 28)), 199_210),
        (lambda: MLP(in_shape=(1, 28, 28), hidden=(5000,)), 3_975_010),
        (lambda: MLP(num_classes=3, in_shape=(1, 2, 2), hidden=()), 15),
        (lambda: CNN(in_shape=(1, 8, 8), width=2, norm="none"), 2 * 10 + 4 * 19 + 8 * 37 + 10 * 9),
    ],
)
def test_number_of_parameters(factory: Callable[[], nn.Module], expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(factory()) == expected


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


def test_mlp_drops_hidden_values_in_training_alone() -> None:
    torch.manual_seed(0)
    network = MLP(in_shape=(1, 2, 2), hidden=(2000,), dropout=0.25)
    x, seen = torch.rand(1, 1, 2, 2), []
    network.classifier.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    network(x)
    network.eval()(x)
    dropped, whole = seen
    kept = dropped != 0
    assert torch.allclose(dropped[kept], whole[kept] / 0.75)
    assert kept.sum() / (whole != 0).sum() == pytest.approx(0.75, abs=0.05)
    assert [name for name, _ in network.chain()] == ["flatten", "hidden.0", "relu_0", "dropout_0", "classifier"]


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


def test_norm_kinds() -> None:
    kinds = [type(make_norm(norm, 8)) for norm in NORMS]
    assert kinds == [BatchNorm2d, StaticBatchNorm2d, nn.GroupNorm, nn.Identity]
    with pytest.raises(ValueError, match=r"norm is 'layer'; choose batch, static_batch, group or none"):
        make_norm("layer", 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (512, 32), (32, 32), (16, 16), (48, 24), (4, 4), (37, 1)])
def test_groups_divide_the_channels(channels: int, groups: int) -> None:
    assert num_groups(channels) == groups


@pytest.mark.parametrize("name", SMALL)
def test_norm_groups_reach_every_group_norm(name: str) -> None:
    """Two channels and more in a group, where 32 groups would be instance norm for layers of up to 32 channels."""
    network = SMALL[name](norm="group", norm_groups=2)
    layers = [module for module in network.modules() if isinstance(module, nn.GroupNorm)]
    assert layers
    assert {layer.num_groups for layer in layers} == {2}
    default = [m.num_groups for m in SMALL[name](norm="group").modules() if isinstance(m, nn.GroupNorm)]
    assert default == [num_groups(layer.num_channels) for layer in layers]


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


# Stacked copies


# Building from a factory


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


def mlp_of(num_classes: int, in_shape: tuple[int, int, int]) -> Network:
    return MLP(num_classes, in_shape)


@pytest.mark.parametrize("factory", [CNN, functools.partial(CNN, width=4), mlp_of, WiderCNN])
def test_python_callables(factory: Callable[..., nn.Module]) -> None:
    assert build_network(factory, 7, (1, 8, 8))(torch.zeros(2, 1, 8, 8)).shape == (2, 7)


def test_a_network_without_parameters_for_classes_is_taken_if_it_fits() -> None:
    built = build_network(configured(f"{__name__}.TenClasses"), 10, (1, 8, 8))
    assert num_parameters(built) == 650  # the check has also given the lazy layer its shape
    with pytest.raises(ValueError, match=r"TenClasses gave \(2, 10\) for two samples of shape \(1, 8, 8\)"):
        build_network(TenClasses, 3, (1, 8, 8))


def test_a_built_module_is_copied() -> None:
    module = UserNet(num_classes=7)
    first, second = build_network(module, 7, (3, 8, 8)), build_network(module, 7, (3, 8, 8))
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
