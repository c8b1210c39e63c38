"""Robust rules: cases by hand, Flower's functions, methods that need only sums, and ranks that agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer.judge import Judge
from lightning_fedssl.updates import Krum, Median, SignFlip, TrimmedMean
from lightning_fedssl.updates.aggregators import why_not_a_mean
from tests.algorithms.helpers import METHODS, toy_rgd, toy_semi_sfl
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import judged_by

LINE = torch.tensor([[0.0], [1.0], [2.0], [4.0], [100.0]])
"""Four honest clients and one far away."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Median(), 2.0),
        (TrimmedMean(0.2), 7 / 3),
        (Krum(attackers=1), 1.0),  # two nearest: 0: 1+4, 1: 1+1, 2: 1+4, 4: 4+9, 100
    ],
)
def test_rules_on_a_line(rule: Any, expected: float) -> None:
    assert float(rule.aggregate(LINE)) == pytest.approx(expected)
    assert float(rule.aggregate(LINE.bfloat16())) == pytest.approx(expected, rel=1e-2)


def test_the_median_of_an_even_number_is_the_mean_of_the_middle() -> None:
    assert float(Median().aggregate(LINE[:4])) == 1.5


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), Krum()])
def test_a_rule_returns_the_only_update(rule: Any) -> None:
    assert torch.equal(rule.aggregate(LINE[3:4]), LINE[3])


RULES = [(Median(), 3), (TrimmedMean(), 5), (TrimmedMean(0.29), 4), (Krum(1), 5), (Krum(), 7), (Krum(4), 11)]


@pytest.mark.parametrize("lie", [1e6, 1e20, 3e38])
@pytest.mark.parametrize(("rule", "fewest"), RULES)
def test_one_liar_among_the_fewest_clients_has_no_say(rule: Any, fewest: int, lie: float) -> None:
    honest = torch.randn(fewest - 1, 50, generator=torch.Generator().manual_seed(0))
    updates = torch.cat([honest, torch.full((1, 50), lie)])
    result = rule.aggregate(updates)
    assert rule.min_updates() == fewest
    assert (result - honest.mean(0)).norm() < 2 * (honest - honest.mean(0)).norm(dim=1).max()


@pytest.mark.parametrize("lie", [1e6, 1e20, -3e38])
@pytest.mark.parametrize("clients", range(3, 21))
def test_as_many_equal_liars_as_a_rule_withstands_have_no_say(clients: int, lie: float) -> None:
    """For every rule that accepts so few clients; between the honest ones is between their extremes in each number."""
    liars: dict[Any, int] = {Median(): (clients - 1) // 2}
    liars |= {TrimmedMean(share): int(share * clients) for share in (0.1, 0.2, 0.34, 0.49)}
    liars |= {Krum(attackers): attackers for attackers in range(1, 10)}
    tried = 0
    for rule, number in liars.items():
        if clients >= rule.min_updates():
            honest = torch.randn(clients - number, 50, generator=torch.Generator().manual_seed(clients))
            result = rule.aggregate(torch.cat([torch.full((number, 50), lie), honest]))
            assert (result >= honest.min(0).values).all(), (type(rule), vars(rule))
            assert (result <= honest.max(0).values).all(), (type(rule), vars(rule))
            tried += number > 0
    assert tried


@pytest.mark.parametrize(("rule", "fewest"), RULES)
def test_a_cohort_of_which_a_rule_leaves_out_none_is_refused(tmp_path: Path, rule: Any, fewest: int) -> None:
    trainer = toy_trainer(tmp_path, updates=[rule], clients_per_round=min(fewest - 1, 4))
    with pytest.raises(ValueError, match=rf"clients_per_round to {fewest} or more"):
        trainer.fit(toy_fedavg(), labeled_clients())


def test_updates_that_are_too_few_for_a_rule_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Two(Judge):
        def judged(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
            yield from list(super().judged(updates))[:2]

    algorithm = toy_fedavg()
    trainer = toy_trainer(tmp_path, max_rounds=1, updates=[Median()], clients_per_round=3)
    trainer.fit(algorithm, labeled_clients(), federation=judged_by(Two))
    start = toy_fedavg(num_classes=3, in_shape=(1, 8, 8))
    start.configure_model()
    assert all(torch.equal(t, start.state_dict()[name]) for name, t in algorithm.server.parameters.items())
    assert "2 updates of a round are not used: a rule needs 3 or more" in caplog.text


@pytest.mark.parametrize("clients", [5, 10])
def test_rules_agree_with_those_of_flower(clients: int) -> None:
    flower = pytest.importorskip("flwr.server.strategy.aggregate", reason="pip install .[flower]")
    updates = torch.from_numpy(np.random.default_rng(clients).standard_normal((clients, 7)))
    results = [([row[:3].numpy(), row[3:].numpy()], 1) for row in updates]
    pairs = {
        "median": (Median(), flower.aggregate_median(results)),
        "trimmed": (TrimmedMean(0.2), flower.aggregate_trimmed_avg(results, 0.2)),
        "krum": (Krum(2), flower.aggregate_krum(results, 2, 0)),
    }
    for name, (rule, theirs) in pairs.items():
        ours = rule.aggregate(updates).numpy()
        np.testing.assert_allclose(ours, np.concatenate(theirs), rtol=1e-12, err_msg=name)


def test_a_median_in_a_run_is_the_median_of_the_updates_that_clients_sent(tmp_path: Path) -> None:
    sent: list[dict[str, torch.Tensor]] = []

    class Watched(Judge):
        def judged(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
            for update in super().judged(updates):
                sent.append({**update.to(torch.device("cpu"), copy=True).parameters})
                yield update

    algorithm, trainer = toy_fedavg(), toy_trainer(tmp_path, max_rounds=1, updates=[Median()])
    trainer.fit(algorithm, labeled_clients(), federation=judged_by(Watched))
    assert len(sent) == 3
    expected = {name: torch.stack([state[name] for state in sent]).median(0).values for name in sent[0]}
    for name, t in expected.items():
        assert torch.equal(algorithm.server.parameters[name], t), name


NEED_ONLY_SUMS = {
    "semifl", "semifl_paper", "fedavg_momentum", "fedavg_adam", "fedswitch", "fixmatch", "uda", "sage",
    "fixmatch_clients", "pseudo_label", "mean_teacher", "semifl_masks", "mean_teacher_numbers",
    "semifl_shares", "fixmatch_shares", "sage_shares",
}  # fmt: skip


class Masked(Judge):
    """The server gets no single update: pairwise masks, which cancel in the weighted sum, hide each of them."""

    def accepted(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        cpu, algorithm = torch.device("cpu"), self.algorithm
        arrived = [update.to(cpu, copy=True) for update in super().accepted(updates)]
        shares = [algorithm.client_weight(update) for update in arrived]
        for i in range(len(arrived) - 1):
            for name, t in {**arrived[0].parameters, **arrived[0].buffers}.items():
                mask = torch.randn_like(t)
                for j, sign in ((i, 1), (i + 1, -1)):
                    state = {**arrived[j].parameters, **arrived[j].buffers}
                    state[name] += sign * mask / shares[j]
        yield from arrived


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_need_only_sums_train_from_masked_updates(name: str, tmp_path: Path) -> None:
    make, data = METHODS[name]
    assert (why_not_a_mean(make()) is None) == (name in NEED_ONLY_SUMS)
    if name not in NEED_ONLY_SUMS:
        return
    models = []
    for judge in (Judge, Masked):
        algorithm, trainer = make(), toy_trainer(tmp_path / judge.__name__, precision="64-true", updates=[])
        trainer.fit(algorithm, data(), federation=judged_by(judge))
        models.append(weights(algorithm))
    for tensor, t in models[0].items():
        torch.testing.assert_close(models[1][tensor], t, rtol=0, atol=1e-6, msg=tensor)


@pytest.mark.parametrize(("make", "why"), [(toy_rgd, "accumulate"), (toy_semi_sfl, "features")])
def test_a_method_whose_server_reads_single_updates_is_refused(make: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"trainer.updates: Median cannot be used with {make().__class__.__name__}.*{why}"
    ):
        toy_trainer(tmp_path, updates=[Median()]).fit(make(), ToyData())


@pytest.mark.parametrize("ranks", [2])
def test_two_ranks_apply_the_same_rule_to_the_same_updates(ranks: int, tmp_path: Path) -> None:
    models = []
    for number in (1, ranks):
        algorithm = toy_semifl()
        settings = {"updates": [SignFlip(0.5), Median()]}
        toy_trainer(tmp_path / str(number), **settings, **forked(number)).fit(algorithm, ToyData())
        models.append(weights(algorithm))
    assert_same(*models)


def test_a_rule_counts_every_update_once(tmp_path: Path) -> None:
    """A client that overstates its number of images has no more influence."""

    class Boastful(Judge):
        def judged(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
            for update in super().judged(updates):
                yield replace(update, num_samples=update.num_samples * (1000 if update.client == 0 else 1))

    models = []
    for judge in (Judge, Boastful):
        algorithm = toy_fedavg()
        trainer = toy_trainer(tmp_path / judge.__name__, updates=[TrimmedMean(0.25)], clients_per_round=4)
        trainer.fit(algorithm, labeled_clients(), federation=judged_by(judge))
        models.append(weights(algorithm))
    assert_same(*models)


@pytest.mark.parametrize("wrong", [lambda: TrimmedMean(0.5), lambda: TrimmedMean(0), lambda: Krum(0)])
def test_impossible_settings_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="give"):
        wrong()
