"""Clients that drop out: the round is exactly that of the others, and nothing of the lost ones is kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedAvg, OverlapSGD
from lightning_fedssl.callbacks import CommunicationLedger, RunReport, StaticBatchNorm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import NO_WORK, LocalWork
from lightning_fedssl.system import Availability, Device, Faults, RandomDropout, SystemModel
from lightning_fedssl.trainer import FederatedTrainer
from tests.algorithms.helpers import METHODS, toy_easgd
from tests.callbacks.test_communication_ledger import ledger_of
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy, toy_fedavg, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import StopAfter, logged


class LastDropsOut(Availability):
    """The last client that is drawn in a round of three drops out."""

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        return float(client == sampling.cohort(seed, round_index, 4, 3)[-1])


class Clock(SystemModel):
    """Client k needs k + 1 seconds."""

    def __init__(self) -> None:
        super().__init__([Device("a", 1.0)])

    def compute_seconds(self, seed: int, round_index: int, client: int, units: float) -> float:
        return client + 1.0

    def rates(self, seed: int, round_index: int, client: int) -> tuple[float, float]:
        return 1e9, 1e9


def fit(folder: Path, algorithm: Any, data: Any, **kwargs: Any) -> Any:
    faults = Faults(kwargs.pop("availability", None))
    trainer = toy_trainer(folder, **{"max_rounds": 2, "logger": False, "faults": faults} | kwargs)
    trainer.fit(algorithm, data)
    return trainer


def select(monkeypatch: pytest.MonkeyPatch, choose: Callable[[list[int], int], list[int]]) -> None:
    """Let the server select only some of the drawn clients, given these and the round."""
    drawn = sampling.cohort
    monkeypatch.setattr(sampling, "cohort", lambda seed, t, clients, size: choose(drawn(seed, t, clients, 3), t))


# Who drops out.


def counts(trainer: FederatedTrainer) -> dict[int, list[int]]:
    """What each client has done: rounds drawn, rounds used, steps, bytes; some were lost."""
    (report,) = [callback for callback in trainer.callbacks if isinstance(callback, RunReport)]
    found = {client: row.tolist() for client, row in report.clients.items()}
    drawn, used, *_ = map(sum, zip(*found.values(), strict=True))
    assert 0 < used < drawn
    return found


def test_every_client_drops_out_as_often_as_configured() -> None:
    draws = [RandomDropout(0.3).drops_out(0, t, k) for t in range(1, 101) for k in range(50)]
    assert sum(draws) / len(draws) == pytest.approx(0.3, abs=0.02)
    assert draws == [RandomDropout(0.3).drops_out(0, t, k) for t in range(1, 101) for k in range(50)]
    assert draws != [RandomDropout(0.3).drops_out(1, t, k) for t in range(1, 101) for k in range(50)]
    assert not any(RandomDropout(0.0).drops_out(0, t, 0) for t in range(100))
    assert all(RandomDropout(1.0).drops_out(0, t, 0) for t in range(100))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomDropout(1.5), "RandomDropout.probability is 1.5: give a probability between 0 and 1"),
        (lambda: RandomDropout(math.nan), "RandomDropout.probability is nan"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Wrong(Availability):
    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        return 2.0


def test_a_users_class_with_a_wrong_probability_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.availability: Wrong gives client . in round 1 a probability of 2"):
        fit(tmp_path, toy_fedavg(), labeled_clients(), availability=Wrong())


# A round is exactly that of the clients that are left.

EASGD_RATE = {"easgd": lambda: toy_easgd(alpha=0.3), "overlap_sgd": lambda: toy_easgd(OverlapSGD, alpha=0.3)}
"""With the default rate, 0.9 / C, EASGD depends on how many clients were selected."""


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_which_clients_drop_out_equals_a_run_in_which_they_were_not_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    make, data = METHODS[method]
    lossy, exact = (EASGD_RATE.get(method, make)() for _ in range(2))
    fit(tmp_path, lossy, data(), availability=LastDropsOut())
    select(monkeypatch, lambda drawn, t: drawn[:-1])
    fit(tmp_path, exact, data())
    assert_same(weights(lossy), weights(exact))
    for name, state in exact.server.extra.items():  # FedRGD's lists the group of who dropped out, too
        assert_same({key: lossy.server.extra[name][key] for key in state}, state)
    kept, expected = lossy.clients.state_dict(), exact.clients.state_dict()
    assert kept.keys() == expected.keys()
    for client, state in expected.items():
        assert_same(kept[client], state)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_survives_rounds_in_which_nobody_takes_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    make, data = METHODS[method]
    algorithm = make()
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, algorithm, data(), availability=RandomDropout(1.0), max_rounds=3)
    assert trainer.round_index == 3
    assert all(t.isfinite().all() for t in weights(algorithm).values())
    lines = [record.getMessage() for record in caplog.records if "took part" in record.getMessage()]
    rounds = [] if method == "supervised" else [1, 2, 3]  # those in which clients would train
    assert lines == [
        f"round {t}: none of the 3 selected clients took part (3 dropped out): no update is averaged in this round"
        for t in rounds
    ]


# Resuming and ranks.

LOSSY: dict[str, Any] = {
    "system": SystemModel([Device("a", 0.1, 0.05), Device("b", 0.4, 0.1)]),
    "faults": Faults(RandomDropout(0.3)),
}


@pytest.mark.parametrize("method", ["semifl", "fed_shvr", "fedmatch_clients", "fedrgd", "semi_sfl_momentum"])
def test_a_lossy_run_resumes_bitwise_identical(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    settings = {**LOSSY, "max_rounds": 5}
    whole, first, second = make(), make(), make()
    reference = toy_trainer(tmp_path / "whole", **settings, callbacks=[CommunicationLedger(), RunReport()])
    reference.fit(whole, data())
    stopping = [CommunicationLedger(), StopAfter(2)]
    toy_trainer(tmp_path / "parts", **settings, callbacks=stopping).fit(first, data())
    resumed = toy_trainer(tmp_path / "parts", **settings, callbacks=[CommunicationLedger(), RunReport()])
    resumed.fit(second, data(), ckpt_path="last")
    assert_same(weights(second), weights(whole))
    for client, state in whole.clients.state_dict().items():
        assert_same(second.clients.state_dict()[client], state)
    expected, found = logged(reference), logged(resumed)
    assert all(found[t] == expected[t] for t in (3, 4, 5))
    assert ledger_of(resumed) == ledger_of(reference)
    assert counts(resumed) == counts(reference)


@pytest.mark.parametrize(
    ("make", "data"),
    [(lambda: toy_fedavg(keep_client_optimizer=True), labeled_clients), (toy_semifl, ToyData)],
)
def test_ranks_lose_the_clients_that_one_rank_loses(tmp_path: Path, make: Any, data: Any) -> None:
    found = []
    for ranks in (1, 2):
        algorithm = make()
        callbacks = [CommunicationLedger(), StaticBatchNorm(source="moments"), RunReport()]
        trainer = toy_trainer(
            tmp_path / str(ranks), precision="64-true", callbacks=callbacks, max_rounds=4, **LOSSY, **forked(ranks)
        )
        trainer.fit(algorithm, data())
        found.append(
            (weights(algorithm), counts(trainer), next((tmp_path / str(ranks)).rglob("ledger.csv")).read_text())
        )
    assert found[0][1:] == found[1][1:]
    for name, t in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], t, rtol=1e-9, atol=1e-12)


class TwoPhases(FedAvg):
    """Trains its clients twice in a round; each skips one of the two, and counts both."""

    def round(self, federation: Any) -> None:
        for self.phase in range(2):
            self.aggregate(self.accumulate(federation.train_clients()))

    def on_client_start(self, data: LocalData) -> LocalWork:
        count = self.clients.get(data.party, "seen").get("count", torch.zeros(()))
        self.clients.put(data.party, "seen", {"count": count + 1})
        return super().on_client_start(data) if (data.party + self.phase) % 2 else NO_WORK


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_keeps_what_clients_that_skip_a_phase_have_stored(tmp_path: Path, ranks: int) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=4, logger=False, **forked(ranks))
    trainer.fit(toy(TwoPhases), labeled_clients())
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["federation"]["clients"]
    assert [int(saved[client]["seen.count"]) for client in range(4)] == [4] * 4


def test_resuming_with_another_availability_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, toy_fedavg(), labeled_clients(), logger=None, callbacks=[StopAfter(1)], max_rounds=3)
    trainer = toy_trainer(tmp_path, max_rounds=3, faults=Faults(RandomDropout(0.1)))
    with pytest.raises(ValueError, match=r"trainer.faults.availability None .now RandomDropout."):
        trainer.fit(toy_fedavg(), labeled_clients(), ckpt_path="last")


# Traffic, time and what is shown.


def test_a_round_takes_as_long_as_its_slowest_client(tmp_path: Path) -> None:
    settings = {"clients_per_round": 4, "system": Clock(), "max_rounds": 1}
    for present, seconds in (({}, 4.0), ({"availability": LastOfFour()}, 3.0)):
        metrics = fit(tmp_path, toy_fedavg(), labeled_clients(), **settings, **present).callback_metrics
        assert metrics["system/round_s"].item() == pytest.approx(seconds, abs=1e-3)


class LastOfFour(Availability):
    """Client 3 drops out of every round."""

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        return float(client == 3)
