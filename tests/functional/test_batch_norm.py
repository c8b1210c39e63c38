from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.functional.batch_norm import (
    Moments,
    Statistics,
    average_moments,
    batch_moments,
    batch_norm_layers,
    combine_moments,
    evaluating,
    has_static_batch_norm,
    local_moments,
)
from lightning_fedssl.models import CNN, WideResNet


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b.to(a.dtype), rtol=1e-12, atol=1e-12)


def column(*values: float) -> Tensor:
    """One-channel, one-pixel float64 images."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1, 1)


def one_layer() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1)).double()


def image_batches(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64) for size in sizes]


def network(kind: str) -> nn.Module:
    torch.manual_seed(1)
    kinds: dict[str, Callable[..., nn.Module]] = {
        "cnn": partial(CNN, width=4),
        "wide_resnet": partial(WideResNet, depth=16, widen_factor=1),
    }
    built = kinds[kind](norm="batch")
    with torch.no_grad():  # scales and shifts that a forgotten affine would show
        for layer in batch_norm_layers(built).values():
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.uniform_(-0.5, 0.5)
    return built.double()


def authors_pass(trained: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
    """A copy whose layers average cumulatively (momentum None) over one sweep in training mode."""
    swept = copy.deepcopy(trained)
    for layer in batch_norm_layers(swept).values():
        layer.momentum = None
        layer.reset_running_stats()
    swept.train()
    with torch.no_grad():
        for images in batches:
            swept(images)
    return swept.eval()


def statistics_of(network: nn.Module, batches: Any) -> Statistics:
    return average_moments(batch_moments(network, batches))


def test_by_hand_batches_weigh_the_same_whatever_their_size() -> None:
    """Batches 0, 2 (mean 1, variance 2) and 4, 6, 8 (6 and 4): mean (1 + 6) / 2, variance (2 + 4) / 2."""
    [(mean, variance)] = statistics_of(one_layer(), [column(0, 2), column(4, 6, 8)]).values()
    assert mean.item() == pytest.approx(3.5, abs=1e-12)
    assert variance.item() == pytest.approx(3.0, abs=1e-12)


def test_by_hand_moments_of_two_parties() -> None:
    """Mean (2 * 1 + 3 * 6) / 5 = 4, variance [1 * 2 + 2 * 3^2 + 2 * 4 + 3 * 2^2] / 4 = 10."""
    parties = [
        {"bn": Moments(2, torch.tensor([1.0]).double(), torch.tensor([2.0]).double())},
        {"bn": Moments(3, torch.tensor([6.0]).double(), torch.tensor([4.0]).double())},
    ]
    total = combine_moments(parties)["bn"]
    assert (total.count, total.mean.item(), total.variance.item()) == (5, 4.0, 10.0)


def test_combining_is_exact_for_one_layer_however_images_are_assigned() -> None:
    layer = nn.Sequential(nn.BatchNorm2d(3)).double()
    batches = [1e3 + batch for batch in image_batches(2, 5, 3, 7)]
    pooled = torch.cat(batches).transpose(0, 1).flatten(1)
    [total] = combine_moments(local_moments(layer, [batch]) for batch in batches).values()
    assert torch.allclose(total.mean, pooled.mean(1), rtol=1e-12, atol=0)
    assert torch.allclose(total.variance, pooled.var(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", ["cnn", "wide_resnet"])
def test_equals_the_authors_cumulative_average(kind: str) -> None:
    trained, batches = network(kind), image_batches(6, 6, 3)
    swept = authors_pass(trained, batches)
    statistics = statistics_of(trained, batches)
    layers = batch_norm_layers(swept)
    assert statistics.keys() == layers.keys()
    for name, (mean, variance) in statistics.items():
        assert close(mean, layers[name].running_mean.detach())  # type: ignore[union-attr]
        assert close(variance, layers[name].running_var.detach())  # type: ignore[union-attr]


def test_a_sweep_leaves_the_network_as_it_was() -> None:
    trained = network("wide_resnet")
    trained.train()
    batch_norm_layers(trained)["norm"].eval()
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    modes = {name: module.training for name, module in trained.named_modules()}
    images = image_batches(4)
    expected = copy.deepcopy(trained)(images[0])
    statistics_of(trained, images)
    local_moments(trained, images)
    assert all(torch.equal(value, state[name]) for name, value in trained.state_dict().items())
    assert {name: module.training for name, module in trained.named_modules()} == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in trained.parameters())
    assert torch.equal(trained(images[0]), expected)
    assert all("forward" not in vars(layer) for layer in batch_norm_layers(trained).values())


def test_a_failing_sweep_leaves_the_network_as_it_was() -> None:
    trained = network("cnn")
    with pytest.raises(RuntimeError):
        statistics_of(trained, [torch.zeros(2, 5, 8, 8, dtype=torch.float64)])
    assert trained.training
    assert all("forward" not in vars(layer) for layer in batch_norm_layers(trained).values())


def test_dropout_is_off_in_a_sweep() -> None:
    dropping = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(3)).double().train()
    plain = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3)).double()
    batches = image_batches(5)
    found, expected = statistics_of(dropping, batches)["1"], statistics_of(plain, batches)["1"]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_float32_networks_are_averaged_in_float64() -> None:
    trained = network("cnn").float()
    statistics = statistics_of(trained, [batch.float() for batch in image_batches(4, 4)])
    assert all(mean.dtype == variance.dtype == torch.float64 for mean, variance in statistics.values())


class WithTeacher(nn.Module):
    """A network beside a teacher that its forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network("cnn"), network("cnn")

    def forward(self, x: Tensor) -> Any:
        return self.student(x)


def test_layers_that_the_forward_pass_does_not_reach_are_left_alone() -> None:
    both = WithTeacher()
    statistics = statistics_of(both, image_batches(4))
    assert list(statistics) == [f"student.norms.{index}" for index in range(3)]


def test_one_value_per_channel_has_no_variance() -> None:
    with pytest.raises(ValueError, match=r"one value per channel at the batch-norm layer '0'.*two samples"):
        statistics_of(one_layer(), [column(1, 2), column(3)])


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no samples.*data\.num_labels"):
        statistics_of(network("cnn"), [])


def test_a_network_without_batch_norm_has_no_statistics_and_is_not_run() -> None:
    assert statistics_of(CNN(norm="group"), iter([torch.zeros(1, 99)])) == {}
    assert local_moments(CNN(norm="group"), []) == {}


def test_has_static_batch_norm() -> None:
    assert has_static_batch_norm(CNN(norm="static_batch"))
    assert not any(has_static_batch_norm(CNN(norm=norm)) for norm in ("batch", "group", "none"))
    assert not has_static_batch_norm(nn.BatchNorm2d(3, track_running_stats=False))


def test_evaluating_gives_every_module_its_mode_back() -> None:
    mixed = nn.Sequential(nn.Dropout(), nn.BatchNorm2d(1)).train()
    mixed[1].eval()
    with evaluating(mixed):
        assert not mixed[0].training
        assert not torch.is_grad_enabled()
    assert [mixed.training, mixed[0].training, mixed[1].training] == [True, True, False]
    assert torch.is_grad_enabled()
