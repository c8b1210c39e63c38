"""Updates that are not valid or explode are rejected, and leave no trace."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples.diagnostics.gradient_diversity import GradientDiversity
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.algorithms.common.site_shares import KEPT
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.optimizers import half_momentum
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN, MLP
from lightning_fedssl.round import Round
from lightning_fedssl.state import ClientUpdate, ServerState
from lightning_fedssl.updates.acceptance import Quarantine, check_update
from lightning_fedssl.updates.rule import Arrival
from tests.algorithms.helpers import METHODS, STATEFUL, toy_fedswitch_sl, toy_semi_sfl, toy_shvr, uneven_clients
from tests.toy import ToyData, assert_same, forked, labeled_clients, sgd, toy_fedavg, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import logged

BIAS, VARIANCE = "network.classifier.bias", "network.norms.0.running_var"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[FedAvg, ClientUpdate]:
    """A method with batch norm, and an update of one of its clients."""
    algorithm = FedAvg(network=partial(CNN, width=4, norm="batch"), optimizer=sgd)
    data = ToyData(label_location="clients", num_labels=24)
    toy_trainer(tmp_path_factory.mktemp("run"), max_rounds=1, logger=False).fit(algorithm, data)
    server = algorithm.server
    buffers = {name: server.buffers[name].clone() for name in algorithm.uploaded_buffers()}
    return algorithm, ClientUpdate(0, {n: p.clone() for n, p in server.parameters.items()}, buffers, 6, 2)


@pytest.mark.parametrize(
    ("part", "name", "tensor", "reason"),
    [
        ("parameters", BIAS, torch.zeros(1), r"as float32 \(1,\) instead of float32 \(3,\)"),
        ("parameters", BIAS, torch.zeros(3).double(), r"as float64 \(3,\) instead of float32 \(3,\)"),
        ("parameters", "other", torch.zeros(3), "'other', which the global model does not have"),
        ("parameters", BIAS, torch.tensor([0, math.nan, 0]), "not finite"),
        ("buffers", VARIANCE, torch.full((4,), math.inf), "not finite"),
        ("payload", "p", torch.tensor(-math.inf), "not finite"),
        ("buffers", VARIANCE, torch.full((4,), -5.0), "a negative variance"),
    ],
)
def test_wrong_tensors_are_refused(
    good: tuple[FedAvg, ClientUpdate], part: str, name: str, tensor: Tensor, reason: str
) -> None:
    algorithm, update = good
    assert check_update(algorithm, update, most_samples=6, most_steps=2) is None
    changes: Any = {part: {**getattr(update, part), name: tensor}}
    assert re.search(reason, str(check_update(algorithm, replace(update, **changes))))


@pytest.mark.parametrize(
    "numbers", [{"num_samples": -5}, {"num_samples": 7}, {"num_steps": 0}, {"num_steps": 3}, {"num_samples": 2**62}]
)
def test_numbers_that_a_client_cannot_have_are_refused(
    good: tuple[FedAvg, ClientUpdate], numbers: dict[str, Any]
) -> None:
    algorithm, update = good
    found = check_update(algorithm, replace(update, **numbers), most_samples=6, most_steps=2)
    assert found is not None
    assert found.startswith("counts")


def test_a_negative_weight_is_refused(good: tuple[FedAvg, ClientUpdate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(good[0], "client_weight", lambda update: -1.0)
    assert check_update(*good) == "has the weight -1.0 in the average"


def rejected(
    updates: list[ClientUpdate],
    received: Callable[[int], dict[str, Tensor]],
    factor: float | None,
    lr_factor: float = 1.0,
) -> list[int]:
    """The clients of a round whose updates the rule rejects; the global model is what client 0 received."""
    model = received(0)
    server = ServerState({"w": model["w"]}, {n: t for n, t in model.items() if n != "w"})
    algorithm: Any = SimpleNamespace(server=server, client_weight=lambda update: 1.0)
    trainer: Any = SimpleNamespace(algorithm=algorithm, round=Round(lr_factor=lr_factor))
    invalid = [update.client for update in updates if check_update(algorithm, update)]
    if factor is None:
        return invalid
    rule, valid = Quarantine(factor), [update for update in updates if update.client not in invalid]
    arrivals = [rule.on_update(trainer, algorithm, Arrival(u), received(u.client)) for u in valid]
    held = [arrival for arrival in arrivals if rule.must_wait(arrival)]
    passed = [arrival.notes for arrival in arrivals if not rule.must_wait(arrival)]
    judged = rule.on_round(trainer, algorithm, held, passed)
    return sorted([*invalid, *(arrival.update.client for arrival in judged if arrival.reason)])


def updates_of(lengths: list[float], sent: dict[str, Tensor]) -> list[ClientUpdate]:
    return [ClientUpdate(k, {"w": sent["w"] + torch.tensor([x, 0.0])}, {}, 1, 1) for k, x in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "factor", "lr_factor", "expected"),
    [
        ([1, 1, 1, 100], 10.0, 1.0, [3]),  # 100 > 10 * 1, and longer than |w| = 5
        ([1, 1, 1, 9], 10.0, 1.0, []),  # 9 < 10 * 1
        ([0.01, 0.01, 0.01, 4], 10.0, 1.0, []),  # 400 times the median, but shorter than |w|
        ([0.01, 0.01, 0.01, 4], 10.0, 0.5, [3]),  # late in a schedule, 4 is longer than half of |w|
        ([100, 1, 1, 1], 10.0, 1.0, [0]),
        ([1, 1, 1, 100], None, 1.0, []),
        ([1, 100], 10.0, 1.0, []),  # no median of two
        ([0, 0, 0, 6], 10.0, 1.0, [3]),  # 6 > 5
        ([1, 1, 1, math.nan], None, 1.0, [3]),
        ([1, 1, math.nan, 100, 1], 10.0, 1.0, [2, 3]),
        ([200, 300, 400, 500], 10.0, 1.0, []),  # all of them diverge: the median cannot tell
    ],
)
def test_the_rule_by_hand(lengths: list[float], factor: float | None, lr_factor: float, expected: list[int]) -> None:
    """The weights sent have the norm 5; an update must exceed both 5 and ``factor`` times the median length."""
    sent = {"w": torch.tensor([3.0, 4.0])}
    assert rejected(updates_of(lengths, sent), lambda client: sent, factor, lr_factor) == expected


def test_each_movement_begins_at_what_its_client_received() -> None:
    """Weights at 5, 1000, 2000 and 5; the clients move by 1, 1 and 300, which is less than 2000, and by 300 from 5."""
    start = {0: 5.0, 1: 1000.0, 2: 2000.0, 3: 5.0}
    moved = {0: 1.0, 1: 1.0, 2: 300.0, 3: 300.0}
    given = [ClientUpdate(k, {"w": torch.tensor([start[k] + moved[k]])}, {}, 1, 1) for k in start]
    assert rejected(given, lambda client: {"w": torch.tensor([start[client]])}, 1.5) == [3]


@pytest.mark.parametrize(("value", "expected"), [(1e30, [3]), (50.0, [])])
def test_buffers_that_explode_are_refused_as_weights_are(value: float, expected: list[int]) -> None:
    """``|received buffers|`` is 10, and the median of the movements 8: 1e30 exceeds ten times the median, 50 not."""
    received = {"w": torch.ones(1), "v": torch.tensor([10.0])}
    values = [18.0, 18.0, 18.0, value]
    given = [ClientUpdate(k, {"w": torch.ones(1)}, {"v": torch.tensor([v])}, 1, 1) for k, v in enumerate(values)]
    assert rejected(given, lambda client: received, 10.0) == expected


POISONED_ROUND = 2


def times(state: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: t * factor if t.is_floating_point() else t for name, t in state.items()}


class Poison(FederatedCallback):
    """The first client of round 2 goes wrong. Notes the state of all clients, or slots, after each round.

    Its batches become NaN, as an overflow would make them, so that its weights and its optimizer's state do too. In
    split learning that would reach the server's part of the network, so there the update alone is spoilt.

    Args:
        factor: Multiplies its batches, or its update: NaN, or so large that its update explodes.
        spoils_the_update: Whether its update alone is spoilt, at the end of its training.
    """

    def __init__(self, factor: float = math.nan, spoils_the_update: bool = False) -> None:
        self.factor = factor
        self.spoils_the_update = spoils_the_update
        self.kept: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.owner = -1

    def on_fit_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        start, end = algorithm.on_client_start, algorithm.on_client_end

        def poisoned(client: int) -> bool:
            return bool(trainer.round_index == POISONED_ROUND and client == trainer.cohort[0])

        def on_client_start(data: LocalData) -> LocalWork:
            work = start(data)
            return (
                replace(work, batch=lambda step: times(work.batch(step), self.factor)) if poisoned(data.party) else work
            )

        def on_client_end(update: ClientUpdate) -> ClientUpdate:
            update = end(update)
            spoilt = times(update.parameters, self.factor)
            return replace(update, parameters=spoilt) if poisoned(update.client) else update

        if self.spoils_the_update or isinstance(algorithm, JointAlgorithm):
            algorithm.on_client_end = on_client_end  # type: ignore[method-assign]
        else:
            algorithm.on_client_start = on_client_start  # type: ignore[method-assign]

    def on_round_end(self, trainer: Any, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        self.kept[trainer.round_index] = {k: algorithm.clients.state_dict().get(k, {}) for k in range(4)}
        if trainer.round_index == POISONED_ROUND:
            self.owner = algorithm.state_owner(trainer.cohort[0])
            assert metrics["client/refused"] == 1


@pytest.mark.parametrize(("name", "at_once"), [(name, 1 + number % 2) for number, name in enumerate(STATEFUL)])
def test_the_state_of_a_rejected_client_is_that_of_the_round_before(tmp_path: Path, name: str, at_once: int) -> None:
    make, data = METHODS[name]
    algorithm, poison = make(), Poison()
    options: dict[str, Any] = {"clients_per_round": 4, "clients_at_once": at_once, "callbacks": poison}
    toy_trainer(tmp_path, max_rounds=3, logger=False, **options).fit(algorithm, data())
    before, after, later = (poison.kept[round_index] for round_index in (1, 2, 3))
    assert before[poison.owner]
    assert_same(after[poison.owner], before[poison.owner])
    others = [owner for owner in range(4) if owner != poison.owner and before[owner]]
    changed = [owner for owner in others if any(not torch.equal(t, after[owner][n]) for n, t in before[owner].items())]
    corrected_once = {n.split(".")[0] for owner in others for n in before[owner]} == {KEPT}
    assert changed or corrected_once or not others, "accepted clients go on"
    assert all(t.isfinite().all() for kept in later.values() for t in kept.values() if t.is_floating_point())


class Absent(FederatedCallback):
    """The first client of round 2 skips the round."""

    def on_fit_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        start: Callable[[LocalData], LocalWork] = algorithm.on_client_start

        def on_client_start(data: LocalData) -> LocalWork:
            absent = trainer.round_index == POISONED_ROUND and data.party == trainer.cohort[0]
            return start(data).limited(0) if absent else start(data)

        algorithm.on_client_start = on_client_start  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("factor", [math.nan, 1e6])
def test_a_rejected_update_leaves_the_model_and_scalars_as_if_the_client_had_skipped_the_round(
    tmp_path: Path, factor: float, ranks: int
) -> None:
    """With 1e6 the other clients' updates wait for the median, as copies."""
    found = []
    for callback in (Poison(factor, spoils_the_update=True), Absent()):
        algorithm = toy_fedavg(keep_client_optimizer=True, aggregation_optimizer=half_momentum)
        callbacks = [callback, GradientDiversity("both")]
        options: dict[str, Any] = {"clients_per_round": 4, "max_rounds": 2, "logger": False, **forked(ranks)}
        trainer = toy_trainer(tmp_path, callbacks=callbacks, **options)
        trainer.fit(algorithm, labeled_clients())
        scalars = {n: v for n, v in trainer.callback_metrics.items() if not n.startswith(("time/", "comm", "client/"))}
        scalars["client/loss"] = trainer.callback_metrics["client/loss"]
        found.append({**weights(algorithm), **scalars})
    assert "diversity/gradient_l2_squared" in found[0]
    assert_same(*found)


def test_pseudo_labels_of_a_rejected_client_are_in_no_scalar(tmp_path: Path) -> None:
    def scalars(*callbacks: FederatedCallback, ranks: int = 1) -> dict[str, float]:
        options: dict[str, Any] = {"max_rounds": POISONED_ROUND, "logger": False, **forked(ranks)}
        trainer = toy_trainer(tmp_path, callbacks=[*callbacks], **options)
        trainer.fit(toy_semifl(), ToyData())
        return {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("pseudo_label/")}

    alone = scalars(Poison(spoils_the_update=True))
    assert alone == scalars(Poison(spoils_the_update=True), ranks=2)
    assert alone["pseudo_label/confident_count"] < scalars()["pseudo_label/confident_count"]


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_exploding_update_is_rejected_named_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: int
) -> None:
    algorithm = toy_shvr(network=partial(MLP, hidden=(8,)))
    options: dict[str, Any] = {"clients_per_round": 4, "clients_at_once": at_once, "callbacks": Poison(1e6, True)}
    with caplog.at_level(logging.WARNING):
        trainer = toy_trainer(tmp_path, **options)
        trainer.fit(algorithm, uneven_clients())
    rows = logged(trainer)
    assert [rows[t].get("client/refused") for t in (1, 2, 3)] == [None, "1.0", None]
    assert rows[2]["communication/upload_bytes"] == rows[1]["communication/upload_bytes"]
    assert re.search(r"round 2: client \d moved its weights by .* times the median of the round", caplog.text)
    assert max(float(t.abs().max()) for t in weights(algorithm).values()) < 10
    assert float(rows[2]["client/loss"]) < 10


def test_quarantine_changes_nothing_in_a_healthy_run(tmp_path: Path) -> None:
    models = []
    for updates in ([Quarantine()], []):
        algorithm = toy_semifl()
        toy_trainer(tmp_path, updates=updates, logger=False).fit(algorithm, ToyData())
        models.append(weights(algorithm))
    assert_same(*models)


class AllPoisoned(FederatedCallback):
    """What every client sends in round 2 is not finite."""

    def on_fit_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        end = algorithm.on_client_end

        def on_client_end(update: ClientUpdate) -> ClientUpdate:
            factor = math.nan if trainer.round_index == 2 else 1.0
            return replace(end(update), parameters=times(update.parameters, factor))

        algorithm.on_client_end = on_client_end  # type: ignore[method-assign]


@pytest.mark.parametrize(("make", "data"), [(toy_fedavg, labeled_clients), (toy_semi_sfl, ToyData)])
def test_a_run_survives_a_round_in_which_all_clients_are_rejected(tmp_path: Path, make: Any, data: Any) -> None:
    algorithm = make()
    trainer = toy_trainer(tmp_path, clients_per_round=4, callbacks=AllPoisoned())
    trainer.fit(algorithm, data())
    assert logged(trainer)[2]["client/refused"] == "4.0"
    assert trainer.round_index == 3
    assert all(t.isfinite().all() for t in weights(algorithm).values())


def broken_features(algorithm: Any) -> Any:
    """The algorithm; the features of client 1 are not finite in round 1, from the first step on."""
    begin: Callable[[LocalData], LocalWork] = algorithm.on_client_start

    def on_client_start(data: LocalData) -> LocalWork:
        work = begin(data)
        if data.party != 1 or data.round != 1:
            return work
        return replace(work, batch=lambda step: times(work.batch(step), math.nan))

    vars(algorithm)["on_client_start"] = on_client_start
    return algorithm


@pytest.mark.parametrize("make", [toy_semi_sfl, toy_fedswitch_sl])
@pytest.mark.parametrize("at_once", [1, 4])
def test_split_learning_without_a_client_equals_a_cohort_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], at_once: int
) -> None:
    """The client whose features are not finite is left out before the server has stepped on them."""
    options: dict[str, Any] = {"clients_per_round": 4, "max_rounds": 1, "clients_at_once": at_once, "logger": False}
    broken, absent = broken_features(make()), make()
    with caplog.at_level(logging.WARNING):
        trainer = toy_trainer(tmp_path, **options)
        trainer.fit(broken, ToyData())
    assert "client 1 sent features that are not finite; it is left out of the average" in caplog.text
    assert trainer.callback_metrics["client/refused"] == 1
    begin = absent.on_client_start
    vars(absent)["on_client_start"] = lambda data: begin(data).limited(0 if data.party == 1 else None)
    other = toy_trainer(tmp_path, **options)
    other.fit(absent, ToyData())
    sent = [float(one.callback_metrics["communication/upload_bytes"]) for one in (trainer, other)]
    assert sent[0] > sent[1]  # by the features of its first step
    for name, t in weights(absent).items():
        torch.testing.assert_close(weights(broken)[name], t)
    assert float(trainer.callback_metrics["client/loss"]) == pytest.approx(float(other.callback_metrics["client/loss"]))
