"""The sequential engine takes short cuts around torch; each gives the bits of the plain way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_training.ops.backward import backward_of
from lightning_fedssl.local_training.ops.clipping import clip_norm
from lightning_fedssl.local_training.ops.optimizer_step import step_by_torch, step_of
from lightning_fedssl.local_training.sequential import add_to_gradients, own_random_stream
from lightning_fedssl.models import CNN
from lightning_fedssl.state import LiveTensors
from tests.toy import ToyData, assert_same, toy_trainer, weights

Factory = Callable[[Any], torch.optim.Optimizer]

PLAIN: Factory = partial(torch.optim.SGD, lr=0.05, fused=True)
MOMENTUM: Factory = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True)
NESTEROV: Factory = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True)
DAMPED: Factory = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, maximize=True, fused=True)
ADAM: Factory = partial(torch.optim.Adam, lr=0.01, fused=True)


def fedavg(optimizer: Factory, **kwargs: Any) -> FedAvg:
    network = partial(CNN, width=4, norm="batch")
    return FedAvg(network=network, optimizer=optimizer, client_epochs=2, num_classes=3, in_shape=(1, 8, 8), **kwargs)


def labeled_clients(**kwargs: Any) -> ToyData:
    return ToyData(num_labels="all", label_location="clients", validation=0, client_batch_size=7, **kwargs)


class PlainLoop:
    """Federated averaging of the toy data as a textbook has it; it shares the draws with the trainer, nothing else."""

    def __init__(self, optimizer: Factory, clip: float | None) -> None:
        self.optimizer, self.clip = optimizer, clip
        self.data = labeled_clients()
        self.data.setup("fit")
        algorithm = fedavg(optimizer)
        algorithm.configure_model()
        self.network = algorithm.network.double()

    def round(self, round_index: int) -> None:
        start = {name: t.clone() for name, t in self.network.state_dict().items()}
        mean = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in start.items()}
        seen = 0
        for client in sampling.cohort(0, round_index, 4, 3):
            self.network.load_state_dict(start)
            data = self.data.local_data(client, round_index, torch.float64)
            self.train(data)
            seen += len(data.labels)
            for name, value in self.network.state_dict().items():
                mean[name].add_(value, alpha=len(data.labels))
        new = {name: (value / seen) if start[name].is_floating_point() else start[name] for name, value in mean.items()}
        self.network.load_state_dict(new)

    def train(self, data: LocalData) -> None:
        optimizer = self.optimizer(self.network.parameters())
        self.network.train()
        for epoch in range(2):
            order = data.permutation(len(data.labels), "labeled", epoch)
            x, y = data.weak(data.labeled[order], "labeled", epoch), data.labels[order]
            for images, labels in zip(x.split(7), y.split(7), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(self.network(images), labels).backward()
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
                optimizer.step()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", [PLAIN, NESTEROV, ADAM])
def test_a_run_is_the_plain_loop_bitwise(tmp_path: Path, optimizer: Factory, clip: float | None) -> None:
    algorithm = fedavg(optimizer, gradient_clip_norm=clip)
    trainer = toy_trainer(tmp_path, max_rounds=3, precision="64-true", logger=False)
    trainer.fit(algorithm, labeled_clients())
    plain = PlainLoop(optimizer, clip)
    for round_index in (1, 2, 3):
        plain.round(round_index)
    result = {name.removeprefix("network."): t for name, t in weights(algorithm).items()}
    assert_same(dict(plain.network.state_dict()), result)


def steps(optimizer: Factory, move_of: Callable[[torch.optim.Optimizer], Callable[[], object]]) -> list[Tensor]:
    """Weights after steps with two groups, the second without gradients at first, and a rate that changes."""
    generator = torch.Generator().manual_seed(0)
    p = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,), (2, 2), ())]
    made = optimizer([{"params": p[:3]}, {"params": p[3:], "lr": 0.3}])
    move = move_of(made)
    for step in range(6):
        for i, parameter in enumerate(p):
            late = i == 3 and step < 2
            parameter.grad = None if late else torch.randn(parameter.shape, generator=generator)
        made.param_groups[0]["lr"] = 0.05 / (1 + step)
        move()
    momenta = [s["momentum_buffer"] for s in made.state.values() if s.get("momentum_buffer") is not None]
    return [*p, *momenta]


@pytest.mark.parametrize("optimizer", [PLAIN, MOMENTUM, NESTEROV, DAMPED, ADAM])
def test_a_step_is_the_optimizer_s(optimizer: Factory) -> None:
    expected, found = steps(optimizer, lambda made: made.step), steps(optimizer, step_of)
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("optimizer", [MOMENTUM, NESTEROV, DAMPED])
def test_weights_that_get_their_first_gradient_later_train_as_without_the_fused_kernel(optimizer: Factory) -> None:
    """The fused kernel alone refuses a step in which only some momenta are new."""

    def trained(move_of: Callable[[torch.optim.Optimizer], Callable[[], object]], fused: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64)) for _ in range(3)]
        move = move_of(optimizer(weights, fused=fused))  # type: ignore[call-arg]
        for step in range(5):
            for first, weight in zip((0, 2, 3), weights, strict=True):
                gradient = torch.randn(3, 2, generator=generator, dtype=torch.float64)
                weight.grad = gradient if step >= first else None
            move()
        return [*weights]

    with pytest.raises(TypeError, match="NoneType"):
        trained(lambda made: made.step, fused=True)
    expected = trained(lambda made: made.step, fused=False)
    for move_of in (step_of, lambda made: partial(step_by_torch, made)):
        torch.testing.assert_close(trained(move_of, fused=True), expected, rtol=1e-12, atol=0)


def test_what_is_added_to_a_missing_gradient_has_the_memory_layout_of_the_weight() -> None:
    """The fused kernel reads memory in order."""
    weight = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    value = torch.arange(48.0).reshape(4, 3, 2, 2)
    add_to_gradients([(weight, value)])
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    assert torch.equal(weight.detach(), -value)


class Own(torch.optim.SGD):
    """An SGD of the user's."""


def test_the_optimizer_s_own_step_where_somebody_could_notice() -> None:
    def is_own(optimizer: torch.optim.Optimizer) -> bool:
        return step_of(optimizer) == optimizer.step

    def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=dtype))]

    assert not is_own(PLAIN(parameters()))
    assert is_own(torch.optim.SGD(parameters()))
    assert is_own(Own(parameters(), fused=True))
    assert is_own(ADAM(parameters()))
    assert is_own(PLAIN(parameters(torch.float64)))
    watched = PLAIN(parameters())
    watched.register_step_post_hook(lambda *_: None)
    assert is_own(watched)
    scheduled = PLAIN(parameters())
    torch.optim.lr_scheduler.ConstantLR(scheduled)  # counts the calls of step by a function in its place
    assert is_own(scheduled)


def gradient(layer: nn.Linear) -> Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_backward_pass_is_torch_s(dtype: torch.dtype) -> None:
    layer = nn.Linear(3, 2).to(dtype)
    x = torch.randn(4, 3, dtype=dtype)
    layer(x).square().mean().backward()
    expected, layer.weight.grad = gradient(layer), None
    backward = backward_of(Fabric(accelerator="cpu"))
    for times in (1, 2):  # gradients add up
        backward(layer(x).square().mean())
        assert torch.equal(gradient(layer), times * expected)


def test_losses_that_are_no_number_are_refused_as_by_torch() -> None:
    backward = backward_of(Fabric(accelerator="cpu"))
    with pytest.raises(RuntimeError, match="scalar outputs"):
        backward(nn.Parameter(torch.ones(2)) * 2)
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(()))


def test_a_party_s_stream_is_manual_seed_s_and_leaves_the_global_one_alone() -> None:
    data = labeled_clients()
    data.setup("fit")
    party = data.local_data(2, 5)
    torch.manual_seed(1)
    torch.rand(3)
    expected_next = torch.get_rng_state()
    with own_random_stream(party):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), expected_next)
    torch.manual_seed(sampling.derive_key(party.seed, "network", 5, 2))
    assert torch.equal(drawn, torch.rand(4))


def test_a_permutation_is_the_stream_s() -> None:
    for count in (0, 1, 7, 500):
        for key in range(3):
            expected = sampling.rng(key, "permutation", "x", count).permutation(count)
            assert sampling.permutation(count, key, "x", count).tolist() == expected.tolist()


class Swaps(nn.Module):
    """Puts a new tensor in the place of its buffer; two layers share a weight."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        out: Tensor = self.b(self.a(x))
        return out


def test_live_tensors_are_those_of_the_module_also_after_a_buffer_was_replaced() -> None:
    module = Swaps()
    live = LiveTensors(module)
    module(torch.zeros(1, 2))
    assert list(live.parameters()) == [name for name, _ in module.named_parameters()] == ["a.weight", "a.bias"]
    assert live.buffers()["count"] is module.count
    live.load({"count": torch.tensor(7.0), "a.bias": torch.ones(2)})
    assert module.count == 7
    assert module.a.bias.tolist() == [1, 1]
    with pytest.raises(KeyError, match="nowhere"):
        live.load({"nowhere": torch.ones(1)})


def test_a_network_that_is_already_built_is_no_layer_beside_its_copy() -> None:
    built = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    algorithm = FedAvg(network=built, num_classes=3, in_shape=(1, 8, 8))
    algorithm.configure_model()
    assert [name for name, _ in algorithm.named_parameters()] == ["network.1.weight", "network.1.bias"]
    assert algorithm.network is not built


@pytest.mark.parametrize("most", [0.5, 1e6, float("inf")])
@pytest.mark.parametrize("second", [torch.float32, torch.float64])
def test_gradients_are_clipped_as_by_torch_to_the_bit(most: float, second: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        nn.Parameter(torch.zeros(3, 4)),
        nn.Parameter(torch.zeros(5, dtype=second)),
        nn.Parameter(torch.zeros(2)),
    ]
    gradients = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights[:2]]  # none for the third
    found = []
    for clip in (clip_norm, nn.utils.clip_grad_norm_):
        for weight, gradient in zip(weights, gradients, strict=False):
            weight.grad = gradient.clone()
        clip(weights, most)
        found.append([weight.grad for weight in weights])
    for ours, torchs in zip(*found, strict=True):
        assert (ours is None and torchs is None) or torch.equal(ours, torchs)
