"""Everything that a client sends passes the rules: batch-norm moments, and what it sends beside its model."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.functional.batch_norm import LayerMoments, Moments, combine_moments
from lightning_fedssl.round import Round
from lightning_fedssl.state import ClientUpdate, ServerState
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.judge import Judge
from lightning_fedssl.updates import Krum, Median, Quarantine, SignFlip, TrimmedMean
from lightning_fedssl.updates.acceptance import check_update
from lightning_fedssl.updates.arrivals import Rules
from lightning_fedssl.updates.rule import Arrival
from tests.algorithms.helpers import METHODS
from tests.toy import ToyData, labeled_clients, toy, toy_fedavg, toy_semifl, toy_trainer

LIES = {
    "far mean": lambda m: m._replace(mean=m.mean * 0 + 1e4),
    "far variance": lambda m: m._replace(variance=m.variance * 0 + 1e6),
    "mean whose square overflows": lambda m: m._replace(mean=m.mean * 0 + 1e30),
    "infinite variance": lambda m: m._replace(variance=m.variance * 0 + 1e300),
    "negative variance": lambda m: m._replace(variance=-m.variance),
    "nan": lambda m: m._replace(mean=m.mean * math.nan),
}


class Counted:
    """Counts as the scalars of a run do."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def count(self, amounts: dict[str, float]) -> None:
        for name, number in amounts.items():
            self.sums[name] = self.sums.get(name, 0) + number


def rules_of(*rules: Any) -> tuple[Rules, Any]:
    """Rules of a run whose model has one layer."""
    server = ServerState({"w": torch.ones(2)}, {"n.running_mean": torch.zeros(5), "n.running_var": torch.ones(5)})
    algorithm = SimpleNamespace(server=server)
    run = SimpleNamespace(scalars=Counted())
    trainer: Any = SimpleNamespace(
        algorithm=algorithm, updates=[*rules], round=Round(1), round_index=1, is_global_zero=True, run=run
    )
    return Rules(trainer), trainer


def parties(clients: int = 9) -> dict[int, LayerMoments]:
    """Moments of the server and of clients whose means differ as much as their samples do."""
    rng = torch.Generator().manual_seed(0)
    found = {}
    for party in range(sampling.SERVER, clients):
        x = torch.randn(40, 5, dtype=torch.float64, generator=rng) + torch.randn(5, generator=rng)
        found[party] = {"n": Moments(40, x.mean(0), x.var(0))}
    return found


@pytest.mark.parametrize("rules", [(), (Quarantine(),)])
def test_honest_moments_are_combined_exactly(rules: Any) -> None:
    found = parties()
    combined, exact = rules_of(*rules)[0].moments(found)["n"], combine_moments(found.values())["n"]
    assert torch.equal(combined.mean, exact.mean)
    assert torch.equal(combined.variance, exact.variance)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), Krum()])
def test_what_parties_differ_by_counts_in_a_robust_variance(rule: Any) -> None:
    """Within a party the variance is 1, between the parties too. Krum chooses one party."""
    variance = rules_of(rule)[0].moments(parties(99))["n"].variance
    least, most = (0.3, 2) if isinstance(rule, Krum) else (1.2, 2.4)
    assert float(variance.min()) > least
    assert float(variance.max()) < most


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("rules", [(Quarantine(),), (Median(),), (TrimmedMean(),), (Krum(),), (Quarantine(), Median())])
def test_a_client_that_lies_in_its_moments_alone_does_not_decide(rules: Any, lie: str) -> None:
    found = parties()
    honest = torch.stack([moments["n"].mean for party, moments in found.items() if party != 3])
    found[3] = {"n": LIES[lie](found[3]["n"])}
    combined = rules_of(*rules)[0].moments(found)["n"]
    assert (combined.mean >= honest.min(0).values).all()
    assert (combined.mean <= honest.max(0).values).all()
    assert float(combined.variance.min()) > 0.2
    assert float(combined.variance.max()) < 5


@pytest.mark.parametrize("lie", list(LIES)[2:])
def test_moments_that_are_not_possible_are_rejected_without_any_rule(lie: str, caplog: Any) -> None:
    found = parties()
    without = {party: moments for party, moments in found.items() if party != 3}
    found[3] = {"n": LIES[lie](found[3]["n"])}
    rules, trainer = rules_of()
    combined, exact = rules.moments(found)["n"], combine_moments(without.values())["n"]
    assert torch.equal(combined.variance, exact.variance)
    assert trainer.run.scalars.sums == {"client/refused": 1}
    assert "client 3: it returned moments" in caplog.text


def test_a_simulated_attacker_falsifies_its_moments_too(caplog: Any) -> None:
    attack = SignFlip(scale=1e6)
    vars(attack)["_attackers"] = frozenset({3})
    rules, _ = rules_of(attack, Quarantine())
    assert float(rules.moments(parties())["n"].mean.abs().max()) < 1
    assert "client 3: it" in caplog.text


def test_a_run_judges_moments_by_its_rules(tmp_path: Path) -> None:

    class Lying(SimulatedFederation):
        def moments(self, parties: Sequence[int], batch_size: int) -> Iterator[tuple[int, LayerMoments]]:
            for party, moments in super().moments(parties, batch_size):
                lie = {name: LIES["far mean"](m) for name, m in moments.items()}
                yield party, lie if party == 1 else moments

    for rules, rejects in ((None, True), ([Median()], False)):
        algorithm = toy_semifl()
        trainer = toy_trainer(tmp_path, max_rounds=2, logger=False, updates=rules, callbacks=StaticBatchNorm("moments"))
        trainer.fit(algorithm, ToyData(), federation=Lying)
        means = [t for name, t in algorithm.server.buffers.items() if name.endswith("running_mean")]
        assert max(float(t.abs().max()) for t in means) < 100
        assert ("client/refused" in trainer.callback_metrics) == rejects


def test_a_buffer_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    class Spoils(FederatedCallback):
        def on_global_model(self, trainer: Any, algorithm: Any) -> None:
            next(iter(algorithm.server.buffers.values())).fill_(math.inf)

    trainer = toy_trainer(tmp_path, logger=False, callbacks=Spoils())
    with pytest.raises(ValueError, match="round 1: the global model has weights or buffers that are not finite"):
        trainer.fit(toy(FedAvg, "batch"), labeled_clients())


def sends_more(name: str) -> bool:
    """Whether the module of a method gives its clients' updates a payload."""
    return "payload=" in inspect.getsource(sys.modules[type(METHODS[name][0]()).__module__])


@pytest.mark.parametrize("method", [name for name in METHODS if sends_more(name)])
def test_a_lie_in_anything_beside_the_model_is_rejected(method: str, tmp_path: Path) -> None:
    """In every tensor of a method's payload in turn; what honest clients send is accepted."""
    tried = set()

    original = Judge.judged

    def watched(self: Judge, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        judge = partial(self.rules.alone, received={}, check=check_update)
        for update in updates:
            assert judge(Arrival(update)).reason is None
            for name, t in update.payload.items():
                for lie in (math.nan, math.inf, -1e30, 1e30):
                    payload: dict[str, Tensor] = {**update.payload, name: torch.full_like(t, lie)}
                    assert judge(Arrival(replace(update, payload=payload))).reason, (name, lie)
                tried.add(name)
            yield update

    make, data = METHODS[method]
    with mock.patch.object(Judge, "judged", lambda self, updates: original(self, watched(self, updates))):
        toy_trainer(tmp_path, logger=False).fit(make(), data())
    assert tried


def test_methods_without_a_payload_declare_no_limits() -> None:
    assert not toy_fedavg().payload_limits(ClientUpdate(0, {}, {}, 1, 1))
