from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.updates import Attack, CentralDP, Median, Quarantine, SignFlip, TrimmedMean, UpdateRule
from lightning_fedssl.updates.rule import Arrival
from tests.toy import Transfers, forked, labeled_clients, toy_fedavg, toy_trainer

PAGE = Path(__file__).parents[2] / "docs" / "update_rules.md"


@pytest.fixture(scope="module")
def rules() -> dict[str, Any]:
    """The classes of the page."""
    found: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, found)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_s_rule_rejects_the_client_that_moves_far(rules: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    liar = SignFlip(0.25, -50)
    trainer = toy_trainer(
        tmp_path, max_rounds=1, clients_per_round=4, updates=[liar, rules["MedianAndMAD"](5.0)], **forked(ranks)
    )
    trainer.fit(toy_fedavg(), labeled_clients())
    (attacker,) = liar.attackers(0, 4)
    assert trainer.participation[attacker] == "rejected"
    assert list(trainer.participation.values()).count("finished") >= 2


def test_the_page_s_compression_sends_few_numbers_and_their_bytes_are_counted(
    rules: dict[str, Any], tmp_path: Path
) -> None:
    transfers, algorithm, rule = Transfers(), toy_fedavg(), rules["TopK"](0.1)
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=1, updates=[rule], callbacks=[transfers])
    algorithm.num_classes, algorithm.in_shape = 3, (1, 8, 8)
    algorithm.configure_model()
    before = {name: t.detach().clone() for name, t in algorithm.named_parameters()}
    trainer.fit(algorithm, labeled_clients())
    kept = {name: max(1, round(0.1 * t.numel())) for name, t in before.items()}
    for name, t in before.items():  # of one update the mean rounds
        assert 0 < int(((algorithm.server.parameters[name] - t).abs() > 1e-6).sum()) <= kept[name]
    assert transfers.bytes(1, trainer.cohort[0], "up") == 8 * sum(kept.values())
    residual = algorithm.clients.get(trainer.cohort[0], "residual")
    assert {name: int((t == 0).sum()) >= kept[name] for name, t in residual.items()} == dict.fromkeys(kept, True)


class Seen(UpdateRule):
    """Notes which updates it is asked about, and their lengths as they arrive."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_update(self, trainer: Any, algorithm: Any, arrival: Arrival, received: Any) -> Arrival:
        moved = [(t - received[n]).norm() ** 2 for n, t in arrival.update.parameters.items()]
        self.seen[arrival.update.client] = float(torch.stack(moved).sum().sqrt())
        return arrival


def test_rules_after_an_attack_see_what_the_attacker_sends(tmp_path: Path) -> None:
    lengths = []
    for attack in ([SignFlip(0.25, -50)], []):
        rule = Seen()
        trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, updates=[*attack, rule], logger=False)
        trainer.fit(toy_fedavg(), labeled_clients())
        lengths.append(rule.seen)
    (attacker,) = SignFlip(0.25).attackers(0, 4)
    for client, length in lengths[1].items():
        assert lengths[0][client] == pytest.approx(length * (50 if client == attacker else 1), rel=1e-4)


class Broken(Attack):
    """Attackers send what is no number."""

    def falsify(self, trained: State, received: State) -> State:
        return map_values(lambda t: t * math.nan, trained)


def test_what_a_rule_changes_is_checked_as_an_update_is(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, updates=[Broken(0.25)], logger=False)
    trainer.fit(toy_fedavg(), labeled_clients())
    assert float(trainer.callback_metrics["client/refused"]) == 1


@pytest.mark.parametrize(
    ("updates", "named"),
    [
        ([Median(), TrimmedMean()], "Median and TrimmedMean both combine"),
        ([Median(), CentralDP(delta=1e-3, noise_multiplier=1)], "Median and CentralDP both combine"),
        ([Median(), Quarantine()], "Quarantine comes after Median"),
        ([Quarantine(), SignFlip(), Quarantine(5)], "has Quarantine twice"),
        ([Median], "Median'>, which is not a rule"),
        ([Quarantine(), SignFlip()], "SignFlip comes after Quarantine"),
    ],
)
def test_orders_that_make_no_sense_are_refused(updates: list[Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        toy_trainer(tmp_path, updates=updates)


def test_a_rule_among_the_callbacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give it in trainer\.updates"):
        toy_trainer(tmp_path, callbacks=[Quarantine()])


class Misspelt(UpdateRule):
    def on_updates(self) -> None:
        raise AssertionError


def test_a_misspelt_function_of_a_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"on_updates.*did you mean on_update"):
        toy_trainer(tmp_path, updates=[Misspelt()])


def test_another_list_of_rules_is_named_when_a_run_resumes(tmp_path: Path) -> None:
    algorithm, data = toy_fedavg(), labeled_clients()
    toy_trainer(tmp_path, max_rounds=1, updates=[Quarantine(5)]).fit(algorithm, data)
    resumed = toy_trainer(tmp_path, updates=[Median()])
    with pytest.raises(ValueError, match=r"trainer.updates \('Quarantine',\) \(now \('Median',\)\)"):
        resumed.fit(toy_fedavg(), labeled_clients(), ckpt_path="last")


@pytest.mark.parametrize("old", ["quarantine", "aggregator", "attack", "privacy"])
def test_an_old_key_names_the_new_one(old: str, tmp_path: Path) -> None:
    keys: Any = {old: None}
    with pytest.raises(TypeError, match=f"no {old}: give updates"):
        toy_trainer(tmp_path, **keys)
