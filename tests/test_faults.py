"""Broken and hostile clients: left out of the round, named and counted, and the round uses the rest."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedssl import MLP, FedAvg
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.averaging import is_finite
from lightning_fedssl.metrics import MetricCollector, means_of
from lightning_fedssl.schedules import Cosine
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer.acceptance import judge
from tests.algorithms.helpers import toy_fedswitch_sl, toy_semi_sfl, toy_shvr, uneven_clients
from tests.test_resume import logged
from tests.toy import ToyData, assert_same, forked, labeled_clients, sgd, toy_fedavg, toy_semifl, toy_trainer, weights


def poison(algorithm: FederatedAlgorithm, client: int, factor: float, round_index: int = 2) -> Any:
    """The algorithm; one client's images are multiplied by a number in one round (0: in every round)."""
    begin = algorithm.on_client_start

    def on_client_start(data: Any) -> Any:
        work = begin(data)
        if data.party != client or round_index not in (0, data.round):
            return work
        batch = work.batch
        return replace(work, batch=lambda step: {n: _scaled(t, factor) for n, t in batch(step).items()})

    vars(algorithm)["on_client_start"] = on_client_start
    return algorithm


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor if tensor.is_floating_point() and tensor.dim() == 4 else tensor


def fit(folder: Path, algorithm: Any, data: Any, **kwargs: Any) -> Any:
    trainer = toy_trainer(folder, **{"clients_per_round": 4, "max_rounds": 3} | kwargs)
    trainer.fit(algorithm, data)
    return trainer


@pytest.mark.parametrize("make", [toy_semi_sfl, toy_fedswitch_sl])
@pytest.mark.parametrize("at_once", [1, 4])
def test_split_learning_leaves_out_a_client_whose_features_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], at_once: int
) -> None:
    algorithm = poison(make(), client=1, factor=math.nan)
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, algorithm, ToyData(), clients_at_once=at_once)
    rows = logged(trainer)
    assert {t: row.get("client/refused") for t, row in rows.items()} == {1: None, 2: "1.0", 3: None}
    assert "round 2: client 1 sent features that are not finite; it is left out of the average" in caplog.text
    assert all(t.isfinite().all() for t in weights(algorithm).values())
    assert all(math.isfinite(float(row["client/loss"])) for row in rows.values())


def test_split_learning_without_a_client_equals_a_cohort_without_it(tmp_path: Path) -> None:
    """The client is left out at the first step, before the server has stepped on its features."""
    broken = poison(toy_semi_sfl(), client=1, factor=math.nan, round_index=1)
    fit(tmp_path, broken, ToyData(), max_rounds=1, logger=False)
    absent = toy_semi_sfl()
    begin = absent.on_client_start
    vars(absent)["on_client_start"] = lambda data: replace(begin(data), num_steps=0) if data.party == 1 else begin(data)
    fit(tmp_path, absent, ToyData(), max_rounds=1, logger=False)
    for name, t in weights(absent).items():
        torch.testing.assert_close(weights(broken)[name], t)


def test_a_round_of_split_learning_in_which_all_clients_are_left_out(tmp_path: Path) -> None:
    algorithm = toy_semi_sfl()
    for client in range(4):
        poison(algorithm, client, math.inf)
    trainer = fit(tmp_path, algorithm, ToyData())
    assert logged(trainer)[2]["client/refused"] == "4.0"
    assert trainer.round_index == 3


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_exploding_update_is_rejected_named_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: int
) -> None:
    algorithm = poison(toy_shvr(network=partial(MLP, hidden=(8,))), client=2, factor=1e6)
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, algorithm, uneven_clients(), clients_at_once=at_once)
    row = logged(trainer)[2]
    assert row["client/refused"] == "1.0"
    assert float(row["communication/upload_bytes"]) == float(logged(trainer)[1]["communication/upload_bytes"])
    assert "round 2: client 2 moved its weights by" in caplog.text
    assert "times the median of the round (trainer.quarantine)" in caplog.text
    largest = max(float(t.abs().max()) for t in weights(algorithm).values())
    assert largest < 10
    assert float(row["client/loss"]) < 10


def updates_of(lengths: list[float], sent: dict[str, Tensor]) -> list[ClientUpdate]:
    return [ClientUpdate(k, {"w": sent["w"] + torch.tensor([x, 0.0])}, {}, 1, 1) for k, x in enumerate(lengths)]


def valid(update: ClientUpdate) -> str | None:
    """A reason to reject an update by itself: numbers that are not finite."""
    return None if is_finite(update.parameters.values()) else "not finite"


def judged(given: Any, sent: dict[str, Any], factor: float | None, *others: list[tuple[float, float]]) -> Any:
    """The verdicts on updates of clients that received the same weights; others have moved on other ranks."""
    return judge(iter(given), lambda client: (sent, {}), factor, lambda own: [own, *others], valid)


@pytest.mark.parametrize(
    ("lengths", "factor", "rejected"),
    [
        ([1, 1, 1, 100], 10.0, [3]),  # 100 > 10 * 1, and longer than |w| = 5
        ([1, 1, 1, 9], 10.0, []),  # 9 < 10 * 1
        ([0.01, 0.01, 0.01, 4], 10.0, []),  # 400 times the median, but shorter than |w|
        ([100, 1, 1, 1], 10.0, [0]),
        ([1, 1, 1, 100], None, []),
        ([1, 100], 10.0, []),  # no median of two
        ([0, 0, 0, 6], 10.0, [3]),  # 6 > 5
        ([1, 1, 1, math.nan], None, [3]),
        ([1, 1, math.nan, 100, 1], 10.0, [2, 3]),
        ([200, 300, 400, 500], 10.0, []),  # all of them diverge: the median cannot tell
    ],
)
def test_the_rule_by_hand(lengths: list[float], factor: float | None, rejected: list[int]) -> None:
    """The weights sent have the norm 5; an update must exceed both 5 and ``factor`` times the median length."""
    sent = {"w": torch.tensor([3.0, 4.0])}
    given = updates_of(lengths, sent)
    found = [(u.client, reason) for u, reason in judged(given, sent, factor)]
    assert [client for client, _ in found] == list(range(len(lengths)))
    assert [client for client, reason in found if reason] == rejected


def test_each_movement_begins_at_what_its_client_received() -> None:
    """Weights at 0, 1000 and 2000; the clients move by 1, 1 and 300, which is less than 2000, and by 300 from 5."""
    start = {0: 5.0, 1: 1000.0, 2: 2000.0, 3: 5.0}
    moved = {0: 1.0, 1: 1.0, 2: 300.0, 3: 300.0}
    given = [ClientUpdate(k, {"w": torch.tensor([start[k] + moved[k]])}, {}, 1, 1) for k in start]
    found = judge(iter(given), lambda client: ({"w": torch.tensor([start[client]])}, {}), 1.5, lambda own: [own], valid)
    assert [update.client for update, reason in found if reason] == [3]


@pytest.mark.parametrize(("lr_factor", "rejected"), [(1.0, []), (0.5, [3]), (0.0, [3])])
def test_late_in_a_schedule_a_shorter_movement_is_an_explosion(lr_factor: float, rejected: list[int]) -> None:
    """400 times the median; 4 is shorter than ``|w| = 5``, but longer than half of it."""
    sent = {"w": torch.tensor([3.0, 4.0])}
    given = iter(updates_of([0.01, 0.01, 0.01, 4], sent))
    found = list(judge(given, lambda client: (sent, {}), 10.0, lambda own: [own], valid, lr_factor))
    assert [update.client for update, reason in found if reason] == rejected


def test_the_factor_of_the_learning_rate_is_that_of_the_schedule(tmp_path: Path) -> None:
    """Cosine over three rounds: ``(1 + cos(pi (t - 1) / 3)) / 2`` is 1, 0.75 and 0.25."""
    found: list[float] = []

    class Reads(FederatedCallback):
        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            found.append(trainer.lr_factor)

    fit(tmp_path, toy_semifl(schedule=Cosine()), ToyData(), callbacks=[Reads()])
    assert found == pytest.approx([1, 0.75, 0.25])


def test_the_median_is_over_the_clients_of_all_ranks() -> None:
    """This rank's two clients moved by 100; the other rank's three by 1."""
    sent = {"w": torch.tensor([3.0, 4.0])}
    found = judge(
        iter(updates_of([100, 100], sent)), lambda client: (sent, {}), 10.0, lambda own: [own, [(1.0, 0.0)] * 3], valid
    )
    assert [reason is None for _, reason in found] == [False, False]
    alone = judged(updates_of([100, 100], sent), sent, 10.0)
    assert [reason for _, reason in alone] == [None, None]


def test_an_update_that_waits_is_a_copy_with_the_values_it_had() -> None:
    """The loop gives updates whose tensors it overwrites."""
    sent = {"w": torch.tensor([3.0, 4.0])}
    live = {"w": torch.zeros(2)}

    def updates() -> Any:
        for client, x in enumerate([50.0, 60.0, 70.0]):
            live["w"].copy_(sent["w"] + torch.tensor([x, 0.0]))
            yield ClientUpdate(client, live, {}, 1, 1)

    values = [float(u.parameters["w"][0]) for u, _ in judged(updates(), sent, 10.0)]
    assert values == [53.0, 63.0, 73.0]


def test_quarantine_changes_nothing_in_a_healthy_run(tmp_path: Path) -> None:
    models = []
    for quarantine in (10.0, None):
        algorithm = toy_semifl()
        fit(tmp_path, algorithm, ToyData(), quarantine=quarantine, logger=False)
        models.append(weights(algorithm))
    assert_same(*models)


def test_ranks_reject_the_clients_that_one_rank_rejects(tmp_path: Path) -> None:
    models = []
    for ranks in (1, 2):
        algorithm = Poisoned(network=partial(MLP, hidden=(8,)), optimizer=sgd, num_classes=3, in_shape=(1, 8, 8))
        trainer = fit(tmp_path / str(ranks), algorithm, labeled_clients(), max_rounds=2, **forked(ranks))
        assert trainer.callback_metrics["client/refused"] == 1
        models.append(weights(algorithm))
    for name, t in models[0].items():
        torch.testing.assert_close(models[1][name], t)


class Poisoned(FedAvg):
    """Client 2's images are a million times too bright in round 2."""

    def on_client_start(self, data: Any) -> Any:
        work = super().on_client_start(data)
        if (data.party, data.round) != (2, 2):
            return work
        batch = work.batch
        return replace(work, batch=lambda step: {n: _scaled(t, 1e6) for n, t in batch(step).items()})


def test_a_rejected_client_s_scalars_do_not_count() -> None:
    collector = MetricCollector()
    for client, loss in ((0, 1.0), (1, math.nan), (2, 3.0)):
        collector.update("client/loss", loss, 2, client)
    for client in range(3):
        collector.discard(client) if client == 1 else collector.commit(client)
    collector.update("server/loss", 5.0)
    assert collector.compute(lambda value: [value]) == {"client/loss": 2.0, "server/loss": 5.0}


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0)], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_of_weight_zero_does_not_count(ranks: int, zero: float | torch.Tensor) -> None:
    collector = MetricCollector(ranks)
    for name, value, weight in (("a", math.nan, zero), ("a", 3.0, 2), ("a", math.nan, zero), ("b", math.nan, zero)):
        collector.update(name, torch.tensor(value), weight, 0)
        collector.update(f"server/{name}", value, weight)
    collector.commit(0)
    assert collector.compute(lambda value: [value]) == {"a": 3.0, "server/a": 3.0}


def test_means_of_ranks_are_those_of_one_rank_bitwise() -> None:
    """Clients 2, 0, 1 log 0.1, 0.3 and 1/3 each; every rank logs the server's loss.

    The sum of client 0 and that of clients 2 and 1 do not add up to the bits of the values added one after another.
    """

    def collected(ranks: int, clients: list[int]) -> MetricCollector:
        collector = MetricCollector(ranks)
        for client in clients:
            for value in (0.1, 0.3, 1 / 3):
                collector.update("client/loss", torch.tensor(value, dtype=torch.float64), 3 + client, client)
            collector.commit(client)
        collector.update("server/loss", 0.1, 7)
        return collector

    alone = collected(1, [2, 0, 1]).compute(lambda value: [value])
    (one, _), (other, _) = (collected(1, clients).sums()["client/loss"] for clients in ([2, 1], [0]))
    assert (one + other) / (3 * 3 + 3 * 4 + 3 * 5) != alone["client/loss"]
    three = [collected(3, clients).take() for clients in ([1, 2], [0], [])]
    assert means_of(three, order=[2, 0, 1]) == alone
    assert three[0].sums == {"server/loss": (0.1 * 7, 7.0)}


def spoil(algorithm: Any, client: int) -> Any:
    """The algorithm; one client trains as it should, but what it sends at the end is not finite."""
    end = algorithm.on_client_end

    def on_client_end(update: ClientUpdate) -> ClientUpdate:
        update = end(update)
        spoilt = {name: torch.full_like(t, math.nan) for name, t in update.parameters.items()}
        return replace(update, parameters=spoilt) if update.client == client else update

    vars(algorithm)["on_client_end"] = on_client_end
    return algorithm


def absent(algorithm: Any, client: int) -> Any:
    """The algorithm; one client skips every round."""
    begin = algorithm.on_client_start
    vars(algorithm)["on_client_start"] = lambda data: begin(data).limited(0 if data.party == client else None)
    return algorithm


LOCAL_TRAINERS: dict[str, dict[str, Any]] = {
    "sequential": {"clients_at_once": 1},
    "stacked": {"clients_at_once": 4},
    "stacks of two": {"clients_at_once": 2},
}


@pytest.mark.parametrize("name", LOCAL_TRAINERS)
@pytest.mark.parametrize(
    ("make", "data"), [(toy_fedavg, lambda: labeled_clients(client_batch_size=7)), (toy_semifl, ToyData)]
)
def test_the_loss_of_a_rejected_client_does_not_enter_the_mean(
    tmp_path: Path, name: str, make: Callable[[], Any], data: Callable[[], Any]
) -> None:
    """The mean is that of a round that the client skips, and not that of a round in which it is accepted."""
    found = []
    for change in (spoil, absent, lambda algorithm, client: algorithm):
        trainer = fit(tmp_path, change(make(), 1), data(), max_rounds=1, logger=False, **LOCAL_TRAINERS[name])
        found.append(float(trainer.callback_metrics["client/loss"]))
    rejected, skipped, accepted = found
    assert rejected == pytest.approx(skipped, rel=1e-6)
    assert rejected != pytest.approx(accepted, rel=1e-6)


@pytest.mark.parametrize("make", [toy_semi_sfl, toy_fedswitch_sl])
@pytest.mark.parametrize("at_once", [1, 4])
def test_the_loss_of_a_client_that_split_learning_rejects_does_not_enter_the_mean(
    tmp_path: Path, make: Callable[[], Any], at_once: int
) -> None:
    """The server has trained on all features; the mean is over the images of the clients that are accepted."""
    algorithm = spoil(make(), 1)
    step, losses, totals = algorithm.joint_training_step, [], []

    def joint_training_step(features: Any, batch_idx: int) -> Any:
        computed = step(features, batch_idx)
        losses.append(computed.image_losses.detach().double().reshape(4, -1))
        totals.append(float(computed.loss.detach()))
        return computed

    vars(algorithm)["joint_training_step"] = joint_training_step
    trainer = fit(tmp_path, algorithm, ToyData(), max_rounds=1, clients_at_once=at_once, logger=False)
    of_images = torch.stack(losses)  # (steps, clients in the order of the cohort, images)
    assert of_images.mean((1, 2)).tolist() == pytest.approx(totals, rel=1e-5)
    accepted = [row for row, client in enumerate(trainer.cohort) if client != 1]
    expected = float(of_images[:, accepted].mean())
    assert float(trainer.callback_metrics["client/loss"]) == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(float(of_images.mean()), rel=1e-6)


@pytest.mark.parametrize("make", [toy_fedavg, toy_shvr])
def test_a_run_survives_a_round_in_which_all_clients_are_rejected(tmp_path: Path, make: Callable[[], Any]) -> None:
    algorithm = make()
    for client in range(4):
        poison(algorithm, client, math.nan)
    data = labeled_clients() if make is toy_fedavg else uneven_clients()
    trainer = fit(tmp_path, algorithm, data)
    assert logged(trainer)[2]["client/refused"] == "4.0"
    assert trainer.round_index == 3
    assert all(t.isfinite().all() for t in weights(algorithm).values())
