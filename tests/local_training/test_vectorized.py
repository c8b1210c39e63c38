"""Stacked clients train as sequential ones do, up to rounding."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.pseudo_labels import pseudo_label
from lightning_fedssl.local_training import LocalTraining, ready, stacked_step, vectorized
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate, ServerState
from tests.local_training.helpers import SGD, Federation, Result, assert_agree, both, clients_of, distance, make


@pytest.mark.parametrize(
    ("network", "method"),
    [("cnn sbn", SemiFL), ("cnn bn", FedAvg), ("wrn sbn", FedAvg), ("resnet9 gn", FedAvg), ("mlp", SemiFL)],
)
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
        partial(torch.optim.NAdam, lr=0.01),
        partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
        partial(torch.optim.ASGD, lr=0.01),
    ],
    ids=lambda p: p.func.__name__,
)
def test_optimizers_and_what_clients_keep_of_them(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    assert_agree(*both(lambda: make(network="mlp", optimizer=optimizer, keep_client_optimizer=True)))


def test_parameter_groups_keep_their_settings() -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [{"params": parameters[3:], "lr": 0.2}, {"params": parameters[:3], "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    assert_agree(*both(lambda: make(optimizer=grouped, keep_client_optimizer=True)))


@pytest.mark.parametrize("at_once", [2, 5])
def test_the_result_depends_neither_on_the_stack_nor_on_the_order(at_once: int) -> None:
    alone = Federation(make(SemiFL, "cnn bn")).train(clients_of())
    assert_agree(alone, Federation(make(SemiFL, "cnn bn")).train(clients_of(), at_once))
    backwards = Federation(make(SemiFL, "cnn bn")).train(clients_of()[::-1], at_once)
    assert distance(alone.updates, backwards.updates) < 1e-10
    assert [client for client, _ in backwards.ended] == [4, 3, 1, 0]


def test_control_variates_are_added_to_each_client_s_gradient() -> None:
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


class Counting(FedAvg):
    """Own weights for every client, a frozen layer, buffers replaced or written in place, scalars of every kind."""

    level: Tensor
    seen: Tensor

    def configure_model(self) -> None:
        super().configure_model()
        self.get_submodule("network.convs.0").requires_grad_(False)
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def broadcast(self, client: int) -> dict[str, Tensor]:
        return {k: t + 0.01 * client if t.is_floating_point() else t for k, t in self.server.model().items()}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.level = 0.9 * self.level + 0.1 * logits.detach().abs().amax(0)[:2]
        self.seen.add_(len(batch["x"]))
        self.log("client/level", self.level.mean(), batch_size=len(batch["x"]))
        self.log("client/images", len(batch["x"]), batch_size=len(batch["x"]))
        self.log("client/step", float(batch_idx))
        self.log("client/nothing", math.nan * loss.detach(), batch_size=0)
        return {"loss": loss + 0.1 * self.level.sum()}

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        bias = self.get_parameter("network.classifier.bias").detach()
        self.clients.put(update.client, "norm", {"bias": bias.norm()})
        return replace(update, payload={"bias": 2 * bias, "seen": self.seen})


def test_buffers_scalars_broadcasts_and_what_hooks_find_in_the_working_module() -> None:
    alone, together = both(lambda: make(Counting, "cnn bn"), at_once=3)
    assert_agree(alone, together)
    assert {"client/loss", "client/level", "client/images", "client/step"} == together.logs.keys()
    assert {k: int(t["seen"]) for k, t in together.updates.items()} == {0: 3 * 23, 1: 3 * 40, 3: 3 * 4, 4: 3 * 14}
    assert torch.equal(together.updates[1]["bias"], 2 * together.updates[1]["network.classifier.bias"])
    assert "network.convs.0.weight" not in together.updates[0]


def test_the_first_steps_alone_and_a_round_without_a_client_that_trains() -> None:
    alone = Federation(make()).train(clients_of(), max_steps=2)
    assert_agree(alone, Federation(make()).train(clients_of(), 4, max_steps=2))
    result = Federation(make()).train(clients_of((0, 0, 0)), 3)
    assert (result.updates, [party for party, _, _ in result.started]) == ({}, [0, 1, 2])


# What clients keep


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5)])
def test_a_run_may_change_its_trainer_between_rounds(optimizer: Any) -> None:
    """Round 2 has clients of round 1, which made different numbers of steps, and a new one."""
    results = []
    for trainers in ((1, 1), (5, 1), (1, 5)):
        federation = Federation(make(optimizer=optimizer, keep_client_optimizer=True, client_epochs=2))
        first, second = clients_of(), clients_of(round_=2)
        federation.train([first[0], first[1], first[3]], trainers[0])
        training, result = LocalTraining(5), Result()
        stacks = [second] if trainers[1] > 1 else [[client] for client in second]
        for update in training.train_clients(federation.phase(result), stacks):
            result.updates[update.client] = {name: t.clone() for name, t in update.parameters.items()}
        # With dampening a momentum of 0 is not a new one: such clients train one after another.
        assert bool(training.refusal) == (trainers[1] > 1 and optimizer is not SGD)
        results.append(result.updates)
    assert distance(results[0], results[1]) < 1e-10
    assert distance(results[0], results[2]) < 1e-10


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)], ids=["sgd", "adam"])
def test_a_finished_client_does_not_move_by_a_bit(optimizer: Any) -> None:
    """Weights, buffers, momentum and step count of a client with 3 steps, in a stack that makes 24."""
    long, short = clients_of((40, 4))
    federation = Federation(make(network="cnn bn", optimizer=optimizer))
    phase = federation.phase(Result())
    started = ready.prepared(phase, [long, short])
    stacks = [vectorized.Stack(phase, started) for _ in range(2)]
    stacks[0].train()
    started[0].work = started[0].work.limited(3)
    stacks[1].train()
    rows = [stack.ended[1][0] | stack.ended[1][1] for stack in stacks]
    assert all(torch.equal(t, rows[1][name]) for name, t in rows[0].items())
    assert not all(torch.equal(t, rows[1][name]) for name, t in stacks[0].ended[0][0].items())


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


# Dropout and precision


class Drops(FedAvg):
    """Only the masks distinguish clients."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return F.dropout(self.network.classifier.weight, 0.5).sum()  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("at_once", [1, 3])
def test_dropout_has_masks_of_its_own_for_each_client_and_round(at_once: int) -> None:
    state = torch.get_rng_state()
    first, again, later = (
        Federation(make(Drops)).train(clients_of((20, 20, 20), round_=number), at_once).updates for number in (1, 1, 2)
    )
    assert distance(first, again) == 0
    assert distance({0: first[0]}, {0: first[1]}) > 0.01
    assert distance(first, later) > 0.01
    assert torch.equal(torch.get_rng_state(), state)


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
    federation, results = Federation(make(Narrow), torch.float32), []
    federation.fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    for at_once in (1, 5):
        results.append(federation.train(clients_of(dtype=torch.float32), at_once, max_steps=1))
        assert types[1:] == [torch.float32] * 3
        assert at_once > 1 or types[0] == torch.bfloat16
    assert distance(results[0].updates, results[1].updates) < 1e-2


# What cannot be stacked


class Item(FedAvg):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        return loss * (1 + 0 * loss.item())


class SkipsShort(FedAvg):
    """Leaves out a last batch of three images."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if len(batch["x"]) == 3 else super().training_step(batch, batch_idx)


class Lion(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("build", "batch_ended", "reason"),
    [
        (lambda: make(Item), None, r"training_step \(test_vectorized\.py:\d+, `return loss \* .*\.item\(\)"),
        (lambda: make(SkipsShort, keep_client_optimizer=True), None, "training_step returned None"),
        (lambda: make(optimizer=partial(Lion, lr=0.1)), None, "the optimizer Lion is not known"),
        (make, print, "a callback reads the model after every step"),
    ],
    ids=["item", "none in a later step", "optimizer", "watcher"],
)
def test_what_cannot_be_stacked_trains_one_after_another_with_one_warning(
    build: Callable[[], FederatedAlgorithm],
    batch_ended: Callable[[int], object] | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the result of sequential training; what the stack has logged until then does not count."""
    federation, reference, training = Federation(build()), Federation(build()), LocalTraining(5)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = federation.train(clients_of(), training=training, batch_ended=batch_ended)
            expected = reference.train(clients_of())
            assert distance(result.updates, expected.updates) == 0
            assert (result.logs, result.ended) == (expected.logs, expected.ended)
    (record,) = caplog.records
    assert "trainer.clients_at_once is 5, but the clients of" in record.message
    assert re.search(reason, record.message), record.message


def test_clients_that_do_not_fit_into_the_memory_name_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stacked_step.StackedStep, "_pass", full)
    with pytest.raises(ValueError, match=r"4 clients do not fit into .* lower trainer\.clients_at_once"):
        Federation(make()).train(clients_of(), 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_clients_are_stacked_and_agree() -> None:
    federations = [Federation(make(SemiFL, "wrn sbn")), Federation(make(SemiFL, "wrn sbn"))]
    clients = [
        replace(d, **{name: getattr(d, name).cuda() for name in ("images", "labeled", "labels", "unlabeled")})
        for d in clients_of()
    ]
    for federation in federations:
        federation.fabric = Fabric(accelerator="cuda", devices=1, precision="64-true")
        federation.algorithm.cuda()
        federation.algorithm.server = ServerState.from_module(federation.algorithm)
        federation.optimizer = federation.algorithm.optimizer(federation.algorithm.parameters())
    training = LocalTraining("auto")
    together = federations[0].train(clients, training=training)
    assert not training.refusal
    assert 0 < distance(federations[1].train(clients).updates, together.updates) < 1e-9
