"""Sequential training is the plain loop of a textbook, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.functional.gradients import add_to_gradients
from lightning_fedssl.functional.optimizer_states import load_optimizer_state
from lightning_fedssl.local_training.sequential import Loop
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN
from lightning_fedssl.state import Batch
from tests.local_training.helpers import Federation, clients_of, make
from tests.toy import ToyData, assert_same, forked, sgd, toy_trainer, weights

Factory = Callable[[Any], torch.optim.Optimizer]

NESTEROV: Factory = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=True)
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


@pytest.mark.parametrize(("optimizer", "clip"), [(NESTEROV, None), (NESTEROV, 0.5), (ADAM, 0.5)])
def test_a_run_is_the_plain_loop_bitwise(tmp_path: Path, optimizer: Factory, clip: float | None) -> None:
    algorithm = fedavg(optimizer, gradient_clip_norm=clip)
    toy_trainer(tmp_path, max_rounds=2, precision="64-true", logger=False).fit(algorithm, labeled_clients())
    plain = PlainLoop(optimizer, clip)
    for round_index in (1, 2):
        plain.round(round_index)
    result = {name.removeprefix("network."): t for name, t in weights(algorithm).items()}
    assert_same(dict(plain.network.state_dict()), result)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_weights_that_get_their_first_gradient_later_train_as_without_the_fused_kernel(dampening: float) -> None:
    """The fused kernel refuses a step in which only some momenta are new; it is not used with dampening."""
    results = []
    for fused in (True, False) if not dampening else (None, False):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64)) for _ in range(3)]
        nesterov = not dampening
        optimizer = torch.optim.SGD(weights, 0.05, 0.9, dampening, nesterov=nesterov, fused=fused)
        load_optimizer_state(optimizer, {})
        for step in range(5):
            for first, weight in zip((0, 2, 3), weights, strict=True):
                gradient = torch.randn(3, 2, generator=generator, dtype=torch.float64)
                weight.grad = gradient if step >= first else None
            optimizer.step()
        results.append(weights)
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


def test_what_is_added_to_a_missing_gradient_has_the_memory_layout_of_the_weight() -> None:
    """The fused kernel reads memory in order."""
    weight = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    value = torch.arange(48.0).reshape(4, 3, 2, 2)
    add_to_gradients([(weight, value)])
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    assert torch.equal(weight.detach(), -value)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_control_variate_is_added_after_clipping(clip: float | None) -> None:
    federation = Federation(make(network="mlp", optimizer=partial(torch.optim.SGD, lr=1.0), gradient_clip_norm=clip))
    algorithm, (name, weight) = federation.algorithm, next(iter(federation.algorithm.named_parameters()))
    before, factor = weight.detach().clone(), 100.0
    work = LocalWork(1, 1, lambda step: {"x": torch.ones(1, 1)}, control_variate={name: torch.ones_like(weight)})
    vars(algorithm)["training_step"] = lambda batch, step: factor * weight.sum()
    Loop(algorithm, federation.optimizer, federation.fabric).train(work, "training_step", "loss", lambda step: None)
    gradient = factor if clip is None else clip / math.sqrt(weight.numel())
    torch.testing.assert_close(before - weight.detach(), torch.full_like(weight, gradient + 1.0))


# Random numbers


def test_a_party_s_stream_is_manual_seed_s_and_leaves_the_global_one_alone() -> None:
    data = clients_of(round_=5)[2]
    before = torch.get_rng_state()
    with own_random_stream(data):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(sampling.derive_key(data.seed, "network", 5, 2))
    assert torch.equal(drawn, torch.rand(4))


class Drops(FedAvg):
    """Uses dropout at the clients, at the server and in an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)

    def on_client_start(self, data: LocalData) -> LocalWork:
        self.log("client/before", F.dropout(torch.ones(9)).sum())
        return super().on_client_start(data)


class Given(Drops):
    """Evaluates without dropout, as its masks depend on the rank."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else FedAvg.forward(self, x)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("method", [Drops, Given])
def test_a_run_with_dropout_is_the_same_again_after_resuming_and_on_two_ranks(
    tmp_path: Path, method: type[FedAvg], at_once: int
) -> None:
    results: list[Any] = []
    for rounds, ranks in (((2,), 1), ((1, 2), 1), ((2,), 2))[: 2 if method is Drops else 3]:
        for number, last in enumerate(rounds):
            torch.manual_seed(len(results) + number)
            algorithm = method(network=CNN, optimizer=sgd, server_epochs=1, num_classes=3, in_shape=(1, 8, 8))
            trainer = toy_trainer(
                tmp_path / str(len(results)), max_rounds=last, clients_at_once=at_once, logger=False, **forked(ranks)
            )
            data = ToyData(num_labels="all", label_location="clients", num_clients=4)
            trainer.fit(algorithm, data, ckpt_path="last" if number else None)
        results.append((weights(algorithm), {k: v for k, v in trainer.callback_metrics.items() if "time/" not in k}))
    for other in results[1:]:
        assert_same(results[0][0], other[0])
        assert results[0][1] == other[1]


# The module


def test_a_batch_that_is_skipped_moves_no_weight_and_is_not_in_the_mean_loss() -> None:
    class Skips(FedAvg):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return None if batch_idx else {"loss": super().training_step(batch, batch_idx)}

    client = clients_of((10,))
    skipping, short = Federation(make(Skips)).train(client), Federation(make()).train(client, max_steps=1)
    assert_same(skipping.updates[0], short.updates[0])
    assert skipping.logs == short.logs


def test_a_network_that_is_already_built_is_no_layer_beside_its_copy() -> None:
    built = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    algorithm = FedAvg(network=built, num_classes=3, in_shape=(1, 8, 8))
    algorithm.configure_model()
    assert [name for name, _ in algorithm.named_parameters()] == ["network.1.weight", "network.1.bias"]
    assert algorithm.network is not built
