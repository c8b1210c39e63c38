from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.augment.views import make_views
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.pseudo_labels import pseudo_label
from lightning_fedssl.local_training import LocalTraining, compatibility, sequential, vectorized
from lightning_fedssl.local_training.ops.stacked_layers import StackedLayers
from lightning_fedssl.local_training.ops.stacked_optimizer import client_optimizers
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.metrics import MetricCollector
from lightning_fedssl.models import CNN, MLP, ResNet9, WideResNet
from lightning_fedssl.state import Batch, ClientUpdate, ServerState
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer.setup import prefer_fused
from tests.toy import SPEC, ToyData, images_of, stand_in, toy_semifl, toy_trainer, weights

SIZES = (23, 40, 0, 4, 14)
"""Images per client; in batches of 5: 5 steps (the last of 3 images), 8, none, 1 (of 4) and 3 (the last of 4)."""

LABELS = torch.arange(120) % 3
IMAGES = images_of(LABELS, 0)
VIEWS = make_views(SPEC, weak="flip_crop", strong="digits")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


class LargeResNet9(ResNet9):
    """On images of twice the size: group norm over two values, as on 8 x 8 images, is a sign and chaotic."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, scale_factor=2))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn sbn": partial(CNN, width=4, norm="static_batch"),
    "cnn bn": partial(CNN, width=4, norm="batch"),
    "wrn sbn": partial(WideResNet, depth=10, widen_factor=1, norm="static_batch"),
    "resnet9 gn": partial(LargeResNet9, width=8, norm="group"),
    "mlp": partial(MLP, hidden=(20,)),
}


def clients_of(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float64, round_: int = 1) -> list[LocalData]:
    """Clients with images of their own, labelled or not as a method likes to see them."""
    parts = torch.arange(sum(sizes)).split(list(sizes))
    return [
        LocalData(party, round_, 0, IMAGES, rows, LABELS[rows], rows, 5, VIEWS, dtype)
        for party, rows in enumerate(parts)
    ]


def make(method: type[FederatedAlgorithm] = FedAvg, network: str = "cnn sbn", **kwargs: Any) -> FederatedAlgorithm:
    defaults: dict[str, Any] = {
        "network": NETWORKS[network],
        "optimizer": SGD,
        "client_epochs": 3,
        "gradient_clip_norm": 0.5,
        "num_classes": 3,
        "in_shape": (1, 8, 8),
    }
    if issubclass(method, SemiFL):
        method, defaults = Semi, defaults | {"threshold": 0.0}
    return method(**defaults | kwargs)


class Semi(SemiFL):
    """SemiFL in which a client without images skips the round."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        return super().on_client_start(data) if len(data.unlabeled) else LocalWork(0, 0, lambda step: {})


@dataclass
class Result:
    """The result of a local trainer in a round."""

    updates: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    work: list[tuple[int, int, int]] = field(default_factory=list)
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    started: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ended: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: Any) -> None:
        self.started.append((data.party, work.num_steps, sizes))

    def client_batch_ended(self, step: int) -> None:
        self.steps.append(step)

    def client_ended(self, update: ClientUpdate) -> None:
        self.ended.append((update.client, update.sizes()))


class Federation:
    """An algorithm with its global model and optimizer, ready to train clients with either engine."""

    def __init__(self, algorithm: FederatedAlgorithm, dtype: torch.dtype = torch.float64) -> None:
        self.algorithm = algorithm
        algorithm.configure_model()
        algorithm.to(dtype)
        algorithm.server = ServerState.of(algorithm)
        algorithm.federation = stand_in()
        self.fabric = Fabric(accelerator="cpu", precision="64-true" if dtype == torch.float64 else "32-true")
        parameters = [p for p in algorithm.parameters() if p.requires_grad]
        self.optimizer = prefer_fused(algorithm.optimizer_factory(parameters))

    def train(self, clients: Sequence[LocalData], at_once: int = 1, max_steps: int | None = None) -> Result:
        result, log = Result(), MetricCollector()
        self.algorithm.collector = log.update
        arguments = (self.algorithm, clients, self.optimizer, self.fabric, result, max_steps)
        updates = (
            sequential.train_clients(*arguments)
            if at_once == 1
            else vectorized.train_clients(*arguments, clients_at_once=at_once)
        )
        for update in updates:
            tensors = {**update.parameters, **update.buffers, **update.payload}
            result.updates[update.client] = {name: t.clone() for name, t in tensors.items()}
            result.work.append((update.client, update.num_samples, update.num_steps))
            self.algorithm.clients.commit(update.client)
        result.kept = self.algorithm.clients.state_dict()
        result.logs = log.compute(lambda own: [own])
        return result


def both(
    build: Callable[[], FederatedAlgorithm], clients: Sequence[LocalData] | None = None, at_once: int = 5
) -> tuple[Result, Result]:
    """A round by the sequential engine and one by the vectorised engine."""
    clients = clients_of() if clients is None else clients
    return Federation(build()).train(clients), Federation(build()).train(clients, at_once)


def distance(a: dict[int, dict[str, Tensor]], b: dict[int, dict[str, Tensor]]) -> float:
    """The largest difference of two numbers."""
    assert a.keys() == b.keys()
    largest = 0.0
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name in a[key]:
            assert a[key][name].shape == b[key][name].shape
            assert a[key][name].dtype == b[key][name].dtype
            largest = max(largest, float((a[key][name] - b[key][name]).abs().max()))
    return largest


def assert_agree(a: Result, b: Result, tolerance: float = 1e-10) -> None:
    assert distance(a.updates, b.updates) < tolerance
    assert distance(a.kept, b.kept) < tolerance
    assert (a.work, a.started, a.ended) == (b.work, b.started, b.ended)
    assert sorted(a.steps) == sorted(b.steps)
    assert a.logs.keys() == b.logs.keys()
    assert a.logs == pytest.approx(b.logs, rel=1e-9)


# Agreement with the reference


@pytest.mark.parametrize("method", [FedAvg, SemiFL])
@pytest.mark.parametrize("network", NETWORKS)
def test_each_client_gets_what_it_gets_alone(network: str, method: type[FederatedAlgorithm]) -> None:
    """24, 15, 9, 3 and no steps, with ragged last batches in the middle of the training."""
    alone, together = both(lambda: make(method, network, keep_client_optimizer=True))
    assert [steps for _, _, steps in alone.work] == [15, 24, 3, 9]
    assert_agree(alone, together, 1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.05),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3, foreach=True),
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
        partial(torch.optim.Adam, lr=0.01, foreach=False),
        partial(torch.optim.NAdam, lr=0.01),
        partial(torch.optim.RAdam, lr=0.01),
        partial(torch.optim.Adamax, lr=0.01),
        partial(torch.optim.Adadelta, lr=1.0),
        partial(torch.optim.Adagrad, lr=0.05),
        partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
        partial(torch.optim.Rprop, lr=0.01),
        partial(torch.optim.ASGD, lr=0.01),
    ],
    ids=lambda p: p.func.__name__,
)
def test_optimizers_and_what_clients_keep_of_them(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    alone, together = both(lambda: make(optimizer=optimizer, keep_client_optimizer=True))
    assert_agree(alone, together)


def test_parameter_groups_keep_their_settings() -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [{"params": parameters[3:], "lr": 0.2}, {"params": parameters[:3], "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    assert_agree(*both(lambda: make(optimizer=grouped, keep_client_optimizer=True)))


def scheduled(parameters: Any) -> torch.optim.Optimizer:
    """An SGD with a learning-rate scheduler, which replaces the method ``step`` of the object."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return optimizer


def test_an_optimizer_with_a_scheduler_moves_the_stacked_weights() -> None:
    """The function in the place of ``step`` makes a step of the optimizer that the scheduler was made for."""
    assert_agree(*both(lambda: make(optimizer=scheduled, keep_client_optimizer=True)))


class TwoHeads(FedAvg):
    """Whole batches pass a further layer, which the loss of a last short batch does not reach."""

    corrected: tuple[int, ...] = ()

    def configure_model(self) -> None:
        super().configure_model()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.head = nn.Linear(3, 3)

    def on_client_start(self, data: LocalData) -> LocalWork:
        added = {"head.bias": torch.full((3,), 0.1, dtype=data.dtype)} if data.party in self.corrected else {}
        return replace(super().on_client_start(data), control_variate=added)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        logits = self(batch["x"])
        return F.cross_entropy(self.head(logits) if self.reaches_head(batch) else logits, batch["y"])

    def reaches_head(self, batch: Batch) -> bool:
        return len(batch["x"]) == 5


class UnusedHead(TwoHeads):
    """No loss reaches the further layer, but two clients correct the gradient of its bias."""

    corrected = (1, 3)

    def reaches_head(self, batch: Batch) -> bool:
        return False


@pytest.mark.parametrize("method", [TwoHeads, UnusedHead])
@pytest.mark.parametrize(
    "optimizer",
    [SGD, partial(torch.optim.SGD, lr=0.05), partial(torch.optim.AdamW, lr=0.01)],
    ids=["momentum", "plain", "adamw"],
)
def test_a_weight_without_a_gradient_stays_although_others_of_the_stack_have_one(
    optimizer: Any, method: type[FederatedAlgorithm]
) -> None:
    """A gradient of 0 would move it by momentum and weight decay, and count as a step."""
    assert_agree(*both(lambda: make(method, optimizer=optimizer, keep_client_optimizer=True)))


class Normalises(FedAvg):
    """Changes weights in place before every step, as prototypes of unit length need it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        weight = self.network.classifier.weight  # type: ignore[union-attr]
        with torch.no_grad():
            weight.copy_(F.normalize(weight, dim=1))  # type: ignore[arg-type, operator]
        return super().training_step(batch, batch_idx)


def test_weights_that_a_step_changes_in_place() -> None:
    """Also with last short batches, for which the rows of some clients are copied."""
    assert_agree(*both(lambda: make(Normalises, keep_client_optimizer=True)))


class Twice(FedAvg):
    """One layer under two names, and one weight in two layers."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second.weight = self.first.weight
        self.layers = nn.ModuleList([self.first, self.norm])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        logits = self.layers[1](self.second(self.layers[0](self(batch["x"])).relu()))
        return F.cross_entropy(self.norm(logits), batch["y"])


def test_layers_with_two_names_and_shared_weights() -> None:
    alone, together = both(lambda: make(Twice, keep_client_optimizer=True))
    assert_agree(alone, together)
    assert "second.bias" in together.updates[0]
    assert "second.weight" not in together.updates[0]


def test_fedprox_pulls_every_client_to_the_global_weights() -> None:
    alone, together = both(lambda: make(prox_mu=0.5))
    assert_agree(alone, together)
    assert distance(alone.updates, Federation(make()).train(clients_of()).updates) > 1e-4


@pytest.mark.parametrize("at_once", [2, 3, 5])
def test_result_depends_neither_on_the_stack_nor_on_the_order(at_once: int) -> None:
    alone = Federation(make(SemiFL, "cnn bn")).train(clients_of())
    together = Federation(make(SemiFL, "cnn bn")).train(clients_of(), at_once)
    assert_agree(alone, together)
    backwards = Federation(make(SemiFL, "cnn bn")).train(clients_of()[::-1], at_once)
    assert distance(alone.updates, backwards.updates) < 1e-10
    assert [client for client, _ in backwards.ended] == [4, 3, 1, 0]


def test_clients_that_receive_different_weights() -> None:
    class PerClient(FedAvg):
        def broadcast(self, client: int) -> dict[str, Tensor]:
            return {k: t + 0.01 * client if t.is_floating_point() else t for k, t in self.server.model().items()}

    alone, together = both(lambda: make(PerClient, "cnn bn"))
    assert_agree(alone, together)


def test_corrections_are_added_to_each_client_s_gradient() -> None:
    """After clipping; client 1 corrects two weights, client 3 one, the others none."""

    class Corrected(FedAvg):
        def on_client_start(self, data: LocalData) -> LocalWork:
            weights = {name: 0.1 * p.detach().sign() for name, p in self.named_parameters() if "classifier" in name}
            chosen = list(weights)[: {1: 2, 3: 1}.get(data.party, 0)]
            return replace(super().on_client_start(data), control_variate={name: weights[name] for name in chosen})

    alone, together = both(lambda: make(Corrected, keep_client_optimizer=True))
    assert_agree(alone, together)
    plain = Federation(make()).train(clients_of())
    moved = {k: distance({k: plain.updates[k]}, {k: together.updates[k]}) for k in plain.updates}
    assert {k for k, far in moved.items() if far > 1e-3} == {1, 3}


def test_frozen_weights_stay_and_are_not_sent() -> None:
    def build() -> FederatedAlgorithm:
        algorithm = make(network="cnn bn")
        algorithm.configure_model()
        algorithm.get_submodule("network.convs.0").requires_grad_(False)
        return algorithm

    alone, together = both(build)
    assert_agree(alone, together)
    assert "network.convs.0.weight" not in together.updates[0]


class Counting(FedAvg):
    """Buffers that a step replaces or writes in place; scalars of every kind."""

    level: Tensor
    seen: Tensor

    def configure_model(self) -> None:
        super().configure_model()
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.level = 0.9 * self.level + 0.1 * logits.detach().abs().amax(0)[:2]
        self.seen.add_(len(batch["x"]))
        self.log("client/level", self.level.mean(), batch_size=len(batch["x"]))
        self.log("client/images", len(batch["x"]), batch_size=len(batch["x"]))
        self.log("client/step", float(batch_idx))
        self.log("client/nothing", math.nan * loss.detach(), batch_size=0)
        return loss + 0.1 * self.level.sum()


def test_buffers_that_a_step_changes_and_scalars_that_it_logs() -> None:
    alone, together = both(lambda: make(Counting))
    assert_agree(alone, together)
    assert {"client/loss", "client/level", "client/images", "client/step"} == together.logs.keys()
    federation = Federation(make(Counting))
    for size, update in zip((23, 40, 4, 14), vectorized.train_clients(
        federation.algorithm, clients_of(), federation.optimizer, federation.fabric, Result(), clients_at_once=4
    ), strict=True):  # fmt: skip
        assert int(federation.algorithm.get_buffer("seen")) == 3 * size
        assert update.parameters["network.classifier.bias"] is not None


def test_hooks_find_the_client_s_weights_in_the_live_module() -> None:
    class Hooked(FedAvg):
        @property
        def bias(self) -> Tensor:
            return self.get_parameter("network.classifier.bias").detach()

        def on_client_start(self, data: LocalData) -> LocalWork:
            assert torch.equal(self.bias, self.server.parameters["network.classifier.bias"])
            return super().on_client_start(data)

        def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
            self.clients.put(update.client, "norm", {"bias": self.bias.norm()})
            return replace(update, payload={"bias": 2 * self.bias})

    alone, together = both(lambda: make(Hooked), at_once=3)
    assert_agree(alone, together)
    assert torch.equal(together.updates[1]["bias"], 2 * together.updates[1]["network.classifier.bias"])
    assert len(together.kept) == 4


def test_the_first_steps_alone() -> None:
    alone = Federation(make()).train(clients_of(), max_steps=2)
    together = Federation(make()).train(clients_of(), 4, max_steps=2)
    assert_agree(alone, together)
    assert [steps for _, _, steps in together.work] == [2, 2, 1 + 1, 2]


def test_a_round_without_a_client_that_trains() -> None:
    result = Federation(make()).train(clients_of((0, 0, 0)), 3)
    assert (result.updates, [party for party, _, _ in result.started]) == ({}, [0, 1, 2])


# What clients keep


@pytest.mark.parametrize("newcomer", [True, False])
@pytest.mark.parametrize(
    "optimizer",
    [SGD, partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5), partial(torch.optim.AdamW, lr=0.01)],
    ids=["sgd", "damped", "adamw"],
)
def test_a_run_may_change_its_engine_between_rounds(optimizer: Any, newcomer: bool) -> None:
    """Round 2 has clients of round 1, which made different numbers of steps, and perhaps a new one."""
    results = []
    for engines in ((1, 1), (5, 1), (1, 5)):
        federation = Federation(make(optimizer=optimizer, keep_client_optimizer=True, client_epochs=2))
        first, second = clients_of(), clients_of(round_=2)
        federation.train([first[0], first[1], first[3]], engines[0])
        results.append(federation.train(second if newcomer else second[:4], engines[1]))
    for other in results[1:]:
        assert_agree(results[0], other)
    fresh = Federation(make(optimizer=optimizer, client_epochs=2)).train(second if newcomer else second[:4])
    assert distance(results[0].updates, fresh.updates) > 1e-4


@dataclass
class Snapshots(Result):
    """Copies of one client's row of a stack after every step."""

    stack: vectorized.Stack | None = None
    rows: list[dict[str, Tensor]] = field(default_factory=list)

    def client_batch_ended(self, step: int) -> None:
        assert self.stack is not None
        self.rows.append({name: t.clone() for name, t in self.stack.row(1).items()})


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)], ids=["sgd", "adam"])
def test_a_finished_client_does_not_move_by_a_bit(optimizer: Any) -> None:
    """Weights, buffers, momentum and step count of a client with 3 steps, in a stack that makes 24."""
    federation = Federation(make(network="cnn bn", optimizer=optimizer))
    federation.algorithm.collector = MetricCollector().update
    ready = list(vectorized.prepared(federation.algorithm, clients_of((40, 4)), Result(), None))
    stack = vectorized.Stack.of(federation.algorithm, ready)
    snapshots = Snapshots(stack=stack)
    optimizers = client_optimizers(federation.optimizer, [{}, {}])
    stack.train([client.work for client in ready], stack.trainable, optimizers, federation.fabric, snapshots)
    assert len(snapshots.rows) == 27
    for name, value in snapshots.rows[5].items():
        assert all(torch.equal(row[name], value) for row in [*snapshots.rows[6:], stack.row(1)])
        assert not torch.equal(stack.row(0)[name], value)
    short = Federation(make(network="cnn bn", optimizer=optimizer, keep_client_optimizer=True))
    expected = short.train([clients_of((40, 4))[1]]).kept[1]
    kept = {f"optimizer.{name}": t for name, t in optimizers.state_of(1).items()}
    assert distance({1: kept}, {1: expected}) < 1e-14
    assert all(float(value) == 3 for name, value in kept.items() if name.endswith(".step"))


def stack_of(algorithm: FederatedAlgorithm, clients: Sequence[LocalData]) -> vectorized.Stack:
    Federation(algorithm)
    algorithm.collector = MetricCollector().update
    ready = list(vectorized.prepared(algorithm, clients, Result(), None))
    return vectorized.Stack.of(algorithm, ready)


@pytest.mark.parametrize("network", ["cnn bn", "resnet9 gn"])
def test_one_client_s_nan_stays_its_own(network: str) -> None:
    """Client 3 trains on NaN, from its first step to after its last."""

    class Spoilt(FedAvg):
        def on_client_start(self, data: LocalData) -> LocalWork:
            work = super().on_client_start(data)
            factor = math.nan if data.party == 3 else 1.0
            return replace(work, batch=lambda step: {"x": factor * (b := work.batch(step))["x"], "y": b["y"]})

    alone, together = both(lambda: make(Spoilt, network, keep_client_optimizer=True))
    assert together.updates[3]["network.classifier.weight"].isnan().all()
    for result in (alone, together):
        del result.updates[3], result.kept[3]
    assert distance(alone.updates, together.updates) < 1e-10
    assert distance(alone.kept, together.kept) < 1e-10


def test_gradients_are_clipped_to_each_client_s_own_norm() -> None:
    leaves = [torch.zeros(3, 2, 2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 100.0])
    gradients = [torch.randn(leaf.shape, generator=generator) for leaf in leaves]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient * scales.reshape(-1, *[1] * (leaf.dim() - 1))
    copies = [[nn.Parameter(torch.zeros(leaf.shape[1:])) for leaf in leaves] for _ in range(3)]
    for row, copy in enumerate(copies):
        for p, leaf in zip(copy, leaves, strict=True):
            assert leaf.grad is not None
            p.grad = leaf.grad[row].clone()
        torch.nn.utils.clip_grad_norm_(copy, 1.5)
    vectorized.clip_gradients(leaves, 1.5)
    for row, copy in enumerate(copies):
        for p, leaf in zip(copy, leaves, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad[row], p.grad)


# Cost


class CountKernels(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += not (func.is_view or func.name() in ("aten::_unsafe_view", "aten::detach"))
        return out


def kernels_per_step(algorithm: FederatedAlgorithm, clients: int, at_once: int) -> float:
    """Operations of a step between the second and the fourth of the training."""
    counts: list[int] = []
    for max_steps in (2, 2, 4):  # the first fills the views' tables of this size of image
        federation = Federation(algorithm, torch.float32)
        data = [replace(d, unlabeled=d.labeled) for d in clients_of((20,) * 6, torch.float32)[:clients]]
        with CountKernels() as counter:
            federation.train(data, at_once, max_steps)
        counts.append(counter.count)
    return (counts[2] - counts[1]) / 2


@pytest.mark.parametrize("network", ["cnn bn", "wrn sbn"])
def test_a_step_of_many_clients_has_the_kernels_of_a_step_of_two(network: str) -> None:
    two, six = (kernels_per_step(make(SemiFL, network), n, n) for n in (2, 6))
    assert two == six
    assert kernels_per_step(make(SemiFL, network), 6, 1) > 3.5 * six


@pytest.mark.parametrize(("network", "layers"), [("wrn sbn", 7), ("resnet9 gn", 8)])
def test_norms_are_the_same_numbers_with_fewer_kernels(network: str, layers: int) -> None:
    counts, gradients = [], []
    for folded in (False, True):
        stack = stack_of(make(network=network), clients_of((10, 10, 10)))
        x = torch.randn(3, 5, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        network_module = stack.algorithm.network

        def loss(weights: dict[str, Tensor], x: Tensor, module: nn.Module = network_module) -> Tensor:
            logits: Tensor = torch.func.functional_call(module, weights, (x,))
            return logits.square().sum()

        leaves = {name.removeprefix("network."): t for name, t in stack.leaves.items()}
        with CountKernels() as counter:
            with StackedLayers() if folded else torch.enable_grad():
                losses = torch.func.vmap(loss)(leaves, x)
            gradients.append(torch.autograd.grad(losses.sum(), list(leaves.values())))
        counts.append(counter.count)
    assert counts[0] - counts[1] >= 5 * layers
    for plain, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, fast, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_s_gradient_has_the_layout_of_its_weight(biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, wanted = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, 5, 4), (3, 2, 4), (3, 2), (3, 5, 2))
    )
    leaves = [t.requires_grad_() for t in ((weight, bias) if biased else (weight,))]
    gradients = []
    for mode in (torch.enable_grad(), StackedLayers()):
        with mode:
            logits = torch.func.vmap(F.linear)(x, *leaves)
        gradients.append(torch.autograd.grad((logits * wanted).sum(), leaves))
    assert not gradients[0][0].is_contiguous()  # what vmap's own rule gives, and what a copy would have to mend
    assert all(gradient.is_contiguous() for gradient in gradients[1])
    for plain, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, fast, rtol=1e-12, atol=1e-12)


def test_a_stacked_linear_layer_in_mixed_precision_has_the_type_of_a_client_s_own() -> None:
    x, weight, bias = torch.randn(3, 5, 4), torch.randn(3, 2, 4), torch.randn(3, 2)
    with torch.autocast("cpu", torch.bfloat16), StackedLayers():
        together = torch.func.vmap(F.linear)(x, weight, bias)
        alone = torch.stack([F.linear(*of_client) for of_client in zip(x, weight, bias, strict=True)])
    assert together.dtype == alone.dtype == torch.bfloat16
    torch.testing.assert_close(together, alone, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shared", [True, False])
def test_other_linear_layers_are_left_to_vmap(shared: bool) -> None:
    x, weight, bias = torch.randn(3, 5, 6, 4), torch.randn(3, 2, 4), torch.randn(3, 2)
    x, dims = (x[:, 0], (0, None, None)) if shared else (x, (0, 0, 0))
    weight, bias = (weight[0], bias[0]) if shared else (weight, bias)
    with StackedLayers():
        together = torch.func.vmap(F.linear, in_dims=dims)(x, weight, bias)
    torch.testing.assert_close(together, torch.func.vmap(F.linear, in_dims=dims)(x, weight, bias), rtol=0, atol=0)


def test_statistics_that_clients_would_share_are_refused() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    with StackedLayers(), pytest.raises(RuntimeError, match="running_mean"):
        torch.func.vmap(lambda x: F.batch_norm(x, zero, one, training=True))(torch.randn(3, 4, 2))
    x, mean = torch.randn(3, 4, 2), torch.randn(3, 2)
    with StackedLayers():
        shared = torch.func.vmap(lambda x: F.batch_norm(x, zero, one))(x)
        own = torch.func.vmap(lambda x, mean: F.batch_norm(x, mean, one))(x, mean)
    torch.testing.assert_close(shared, x / math.sqrt(1 + 1e-5))
    torch.testing.assert_close(own, (x - mean[:, None]) / math.sqrt(1 + 1e-5))


# The choice of the engine


class Item(FedAvg):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        return loss * (1 + 0 * loss.item())


class Counter(FedAvg):
    calls = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.calls += 1
        return F.cross_entropy(self(batch["x"]), batch["y"]) / self.calls


class Average(FedAvg):
    level = torch.zeros((), dtype=torch.float64)

    def configure_model(self) -> None:
        super().configure_model()
        self.level = torch.zeros(())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.level.mul_(0.9)
        return loss


class Remembers(FedAvg):
    def on_client_start(self, data: LocalData) -> LocalWork:
        self.mine = torch.full((3,), float(data.party), dtype=data.dtype)
        return super().on_client_start(data)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self(batch["x"]) + self.mine, batch["y"])


class ReadsLive(FedAvg):
    def on_client_start(self, data: LocalData) -> LocalWork:
        work = super().on_client_start(data)

        def batch(step: int) -> Batch:
            with torch.no_grad():
                return {"x": (b := work.batch(step))["x"], "y": self(b["x"]).argmax(1)}

        return replace(work, batch=batch)


class Draws(FedAvg):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        logits = self(batch["x"])
        return F.cross_entropy(logits + torch.rand_like(logits), batch["y"])


class Skips(FedAvg):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None


class SkipsShort(FedAvg):
    """Leaves out a last batch of three images."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if len(batch["x"]) == 3 else super().training_step(batch, batch_idx)


class Lion(torch.optim.SGD):
    pass


def replaced_step(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    vars(optimizer)["step"] = partial(torch.optim.SGD.step, optimizer)
    return optimizer


def chosen(training: LocalTraining, federation: Federation, clients: Sequence[LocalData] | None = None) -> Result:
    """A round by the engine that is chosen."""
    result, clients = Result(), clients_of() if clients is None else clients
    log = MetricCollector()
    federation.algorithm.collector = log.update
    for update in training.train_clients(
        federation.algorithm, [clients], federation.optimizer, federation.fabric, result
    ):
        tensors = {**update.parameters, **update.buffers}
        result.updates[update.client] = {name: t.clone() for name, t in tensors.items()}
        federation.algorithm.clients.commit(update.client)
    result.logs = log.compute(lambda own: [own])
    return result


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: make(SemiFL, pseudo_label_source="local"), "_local_label_step"),
        (lambda: make(Item), r"training_step \(test_vectorized\.py:\d+, `return loss \* .*\.item\(\)"),
        (lambda: make(Counter), "training_step changes the attribute calls"),
        (lambda: make(Average), "training_step changes the attribute level"),
        (lambda: make(Remembers), "on_client_start changes the attribute mine"),
        (lambda: make(ReadsLive), "a stacked step gives another"),
        (lambda: make(Draws), r"training_step .*randomness"),
        (lambda: make(Skips), "training_step returned None"),
        (lambda: make(optimizer=partial(Lion, lr=0.1)), "the optimizer Lion is not known"),
        (lambda: make(optimizer=replaced_step), "the step of this SGD was replaced"),
    ],
    ids=[
        "boolean index",
        "item",
        "counter",
        "average",
        "attribute",
        "live weights",
        "random",
        "none",
        "optimizer",
        "step",
    ],
)
def test_what_cannot_be_stacked_trains_one_after_another_with_one_warning(
    build: Callable[[], FederatedAlgorithm], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation, reference, training = Federation(build()), Federation(build()), LocalTraining(3)
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING):
        results = [chosen(training, federation) for _ in range(2)]
    (record,) = caplog.records
    assert "trainer.clients_at_once is 3, but the clients of" in record.message
    assert re.search(reason, record.message), record.message
    torch.manual_seed(5)
    for result in results:
        expected = reference.train(clients_of())
        assert distance(result.updates, expected.updates) == 0
        assert result.logs == expected.logs


def test_a_later_step_that_cannot_be_stacked_is_made_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    """The compatibility check has seen the first step alone; what the stack has logged until then does not count."""
    federation, reference, training = (
        Federation(make(SkipsShort, keep_client_optimizer=True)),
        Federation(make(SkipsShort, keep_client_optimizer=True)),
        LocalTraining(2),
    )
    for _ in range(2):
        result, expected = chosen(training, federation), reference.train(clients_of())
        assert distance(result.updates, expected.updates) < 1e-10
        assert result.logs == pytest.approx(expected.logs)
        assert result.ended == expected.ended
    (message,) = caplog.messages
    assert re.search("trainer.clients_at_once is 2, but .* SkipsShort .* training_step returned None", message)


def test_the_trial_leaves_no_trace_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []
    original = compatibility.try_together

    def counted(*arguments: Any) -> list[LocalData]:
        tried = original(*arguments)
        trials.append(len(tried))
        return tried

    monkeypatch.setattr(compatibility, "try_together", counted)

    class Listens(Counting):
        def on_client_start(self, data: LocalData) -> LocalWork:
            self.clients.put(data.party + 100, "trace", {"touched": torch.ones(1)})
            return super().on_client_start(data)

    federation = Federation(make(Listens))
    state = torch.get_rng_state()
    before = {name: t.clone() for name, t in federation.algorithm.state_dict().items()}
    compatibility.try_together(federation.algorithm, clients_of())
    assert all(torch.equal(t, before[name]) for name, t in federation.algorithm.state_dict().items())
    assert (len(federation.algorithm.clients), trials) == (0, [3])
    assert torch.equal(torch.get_rng_state(), state)
    training = LocalTraining(4)
    results = [chosen(training, federation) for _ in range(2)]
    reference = Federation(make(Listens)).train(clients_of())
    assert trials == [3, 3]
    assert distance(results[0].updates, reference.updates) < 1e-10
    assert results[0].logs == pytest.approx(reference.logs)


def test_a_round_with_one_client_decides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    federation, training = Federation(make()), LocalTraining(4)
    choices = []
    for clients in (clients_of((0, 10, 0)), clients_of()):
        chosen(training, federation, clients)
        choices.append(training._chosen)
    assert choices == [None, 4]
    assert not caplog.records


def test_automatic_choice_on_a_cpu_is_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "train_clients", lambda *a, **k: pytest.fail("stacked"))
    result = chosen(LocalTraining("auto"), Federation(make()))
    assert result.updates.keys() == {0, 1, 3, 4}


def test_a_callback_that_watches_every_step_trains_clients_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    result = chosen(LocalTraining(3, watchers=["WeightPlot"]), Federation(make()))
    assert result.updates.keys() == {0, 1, 3, 4}
    assert "WeightPlot reads the model after every step" in caplog.text


def test_number_of_clients_that_fit_is_read_off_a_line() -> None:
    """100 for all and 50 for each: 85 % of 2,000 hold (1,700 - 100) / 50 = 32 clients."""
    assert compatibility.StackMemory.measured(lambda n: 100 + 50 * n, 3, 2000).largest_number() == 32
    assert compatibility.StackMemory.measured(lambda n: 100 + 50 * n, 2, 120).largest_number() == 1
    assert compatibility.StackMemory.measured(lambda n: 100, 3, 1000).largest_number() == (850 - 90) // 10


def test_the_trial_works_in_float32_and_under_bf16_autocast() -> None:
    federation = Federation(make(SemiFL, "wrn sbn"), torch.float32)
    assert len(compatibility.try_together(federation.algorithm, clients_of(dtype=torch.float32))) == 3
    federation.fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    alone = federation.train(clients_of(dtype=torch.float32), max_steps=1)
    together = federation.train(clients_of(dtype=torch.float32), 5, max_steps=1)
    assert distance(alone.updates, together.updates) < 1e-2


types: list[torch.dtype] = []


class Narrow(FedAvg):
    """Notes the types of what autocast computes in 16 bits, and of what must have 32."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        narrow, logits = self.network(batch["x"]), self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        types[:] = [narrow.dtype, logits.dtype, loss.dtype, pseudo_label(narrow.bfloat16(), 0.95).confidence.dtype]
        return loss


def test_softmax_and_losses_have_32_bits_under_autocast() -> None:
    """vmap takes softmax apart before autocast sees it; a confidence in bfloat16 would be a multiple of 1/256."""
    federation = Federation(make(Narrow), torch.float32)
    federation.fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    for at_once in (1, 5):
        federation.train(clients_of(dtype=torch.float32), at_once, max_steps=1)
        assert types[1:] == [torch.float32] * 3
        assert at_once > 1 or types[0] == torch.bfloat16


def test_one_step_in_float32_agrees_to_rounding() -> None:
    results = [
        Federation(make(SemiFL), torch.float32).train(clients_of(dtype=torch.float32), at_once, max_steps=1)
        for at_once in (1, 5)
    ]
    assert 0 < distance(results[0].updates, results[1].updates) < 1e-6


@pytest.mark.parametrize("largest", [0, 1, 3])
def test_a_stack_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """It fails in its second step; nothing is logged twice. A single client that does not fit is an error.

    On a CPU a single client trains without a stack.
    """

    def full(self: vectorized.Stack, batches: Any, step: int) -> Tensor:
        if len(self.tensors["network.classifier.bias"]) > largest and step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, batches, step)

    federations = [Federation(make(Counting, keep_client_optimizer=True)) for _ in range(2)]
    whole = federations[0].train(clients_of(), 5)
    loss = vectorized.Stack.loss
    monkeypatch.setattr(vectorized.Stack, "loss", full)
    if largest:
        halves = federations[1].train(clients_of(), 5)
        assert distance(whole.updates, halves.updates) < 1e-10
        assert distance(whole.kept, halves.kept) < 1e-10
        assert halves.logs == pytest.approx(whole.logs, rel=1e-8)
        assert halves.work == whole.work
    else:
        monkeypatch.setattr(Fabric, "device", property(lambda fabric: torch.device("meta")))
        with pytest.raises(ValueError, match=r"1 clients do not fit into .* lower data\.client_batch_size"):
            federations[1].train(clients_of(), 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_the_stack_is_as_large_as_fits_and_agrees() -> None:
    federations = [Federation(make(SemiFL, "wrn sbn")), Federation(make(SemiFL, "wrn sbn"))]
    clients = [
        replace(d, **{name: getattr(d, name).cuda() for name in ("images", "labeled", "labels", "unlabeled")})
        for d in clients_of()
    ]
    for federation in federations:
        federation.fabric = Fabric(accelerator="cuda", devices=1, precision="64-true")
        federation.algorithm.cuda()
        federation.algorithm.server = ServerState.of(federation.algorithm)
        federation.optimizer = federation.algorithm.optimizer_factory(federation.algorithm.parameters())
    training = LocalTraining("auto")
    together = chosen(training, federations[0], clients)
    assert training._chosen is not None
    assert training._chosen > 5
    alone = federations[1].train(clients)
    assert distance(alone.updates, together.updates) < 1e-9
    assert torch.cuda.max_memory_allocated() < torch.cuda.get_device_properties(0).total_memory


# A whole run


def test_a_run_with_either_engine_is_the_same_run(tmp_path: Path) -> None:
    """Also one that is stopped and resumed with the other engine."""
    results, metrics = [], []
    for at_once in (1, 3):
        algorithm = toy_semifl(network=NETWORKS["cnn bn"])
        trainer = toy_trainer(tmp_path / str(at_once), clients_at_once=at_once, max_rounds=3, precision="64-true")
        trainer.fit(algorithm, ToyData())
        assert trainer.local_training._chosen == at_once
        results.append(weights(algorithm))
        metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")})
    assert distance({0: results[0]}, {0: results[1]}) < 1e-10
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-8)
    algorithm = toy_semifl(network=NETWORKS["cnn bn"])
    common = {"max_rounds": 3, "precision": "64-true", "callbacks": StopAfter(1)}
    toy_trainer(tmp_path / "x", clients_at_once=3, **common).fit(algorithm, ToyData())
    resumed = toy_semifl(network=NETWORKS["cnn bn"])
    toy_trainer(tmp_path / "x", clients_at_once=1, max_rounds=3, precision="64-true").fit(resumed, ToyData(), "last")
    assert distance({0: results[0]}, {0: weights(resumed)}) < 1e-10


class StopAfter(FederatedCallback):
    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        trainer.should_stop = trainer.round_index >= self.last


class Watcher(FederatedCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_client_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        self.steps += 1


def test_the_trainer_tells_the_engine_of_callbacks_that_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher()
    trainer = toy_trainer(tmp_path, clients_at_once=2, max_rounds=1, callbacks=watcher, logger=False)
    trainer.fit(toy_semifl(), ToyData())
    assert watcher.steps > 3
    assert "Watcher reads the model after every step" in caplog.text


@pytest.mark.parametrize("value", [0, -1, "all", 1.5, True])
def test_bad_numbers_of_clients_at_once_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"trainer\.clients_at_once is .*auto"):
        FederatedTrainer(clients_at_once=value, accelerator="cpu")


class CountsLaterSteps(FedAvg):
    """A number that changes from the second step on, and enters the loss."""

    seen = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx:
            self.seen += 1
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else loss * (1 + self.seen)


def test_the_trial_compares_the_second_step_too() -> None:
    with pytest.raises(compatibility.CannotTrainTogetherError, match="training_step changes the attribute seen"):
        compatibility.try_together(Federation(make(CountsLaterSteps)).algorithm, clients_of())


def test_the_trial_takes_a_weight_that_only_whole_batches_reach() -> None:
    """Of 7 images, so that the second batch of one client is short."""
    algorithm = Federation(make(TwoHeads)).algorithm
    assert len(compatibility.try_together(algorithm, clients_of((7, 23, 40)))) == 3
