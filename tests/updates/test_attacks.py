"""Simulated attackers: what they send by hand, what they train on, and that it comes to the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.state import ClientUpdate, load_state
from lightning_fedssl.updates import ALIE, LabelFlip, PseudoLabelPoison, Quarantine, SignFlip
from tests.algorithms.helpers import fully_labeled, toy_rgd, toy_rscfed
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights

MODEL = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])}


def update(client: int, *values: float) -> ClientUpdate:
    w, b = torch.tensor(values[:2]).float(), torch.tensor(values[2:]).float()
    return ClientUpdate(client, {"w": w}, {"b": b}, num_samples=1, num_steps=1)


def sent(attack: Any, *updates: ClientUpdate, attackers: Any = frozenset({0})) -> list[list[float]]:
    states = {u.client: {**u.parameters, **u.buffers} for u in updates}
    own, others = ([s for k, s in states.items() if (k in attackers) is lies] for lies in (True, False))
    attack.falsify(own, others, MODEL, np.random.default_rng(0))
    return [torch.cat([*state.values()]).tolist() for state in states.values()]


@pytest.mark.parametrize(
    ("attack", "expected"), [(SignFlip(0.5, -3), [4.0, 5.0, -3.0]), (SignFlip(0.5, 2), [-1.0, 0, 2.0])]
)
def test_an_attacker_moves_in_another_direction_and_others_do_not(attack: Any, expected: list[float]) -> None:
    honest = update(1, 5, 6, 7)
    found = sent(attack, update(0, 2, 3, -1), honest)
    assert found[0] == pytest.approx(expected)
    assert found[1] == [5, 6, 7]


def test_alie_sends_the_shifted_mean_of_the_others() -> None:
    others = [update(1, 1, 0, 0), update(2, 3, 0, 6)]
    found = sent(ALIE(z=0.5), update(0, 9, 9, 9), *others, update(3, 8, 8, 8), attackers=frozenset({0, 3}))
    assert found[0] == found[3] == pytest.approx([2 - 0.5 * 2**0.5, 0, 3 - 0.5 * 18**0.5])
    # The paper's example: n = 50 and m = 24 leave s = 2 supporters to win, and z is the quantile of 24 / 26.
    assert ALIE.largest_shift(24, 26) == pytest.approx(1.426, abs=1e-3)


def test_the_attackers_are_a_share_of_the_clients_and_a_function_of_the_seed() -> None:
    attack = SignFlip(share=0.3)
    assert len(attack.attackers(0, 20)) == 6
    assert attack.attackers(0, 20) == SignFlip(share=0.3).attackers(0, 20) != attack.attackers(1, 20)


class Labels(FederatedCallback):
    """The labels that each client trains on."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}
        self.images: dict[int, torch.Tensor] = {}

    def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
        self.seen[data.party], self.images[data.party] = data.labels, data.images[data.unlabeled]


def test_label_flip_reverses_the_labels_of_the_attackers_alone(tmp_path: Path) -> None:
    found = Labels()
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, updates=[LabelFlip(0.5)], callbacks=found)
    trainer.fit(toy_fedavg(), labeled_clients())
    attackers = LabelFlip(0.5).attackers(trainer.seed, 4)
    for client, labels in found.seen.items():
        true = trainer.local_data(client).labels
        assert torch.equal(labels, 2 - true if client in attackers else true)


def test_label_flip_leaves_an_attacker_without_labels_as_it_is(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, updates=[LabelFlip(1.0)])
    trainer.fit(toy_rscfed(), fully_labeled())
    assert trainer.round_index == 1


def test_label_flip_without_labels_at_the_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LabelFlip needs labels at the clients.*PseudoLabelPoison"):
        toy_trainer(tmp_path, updates=[LabelFlip(1.0)]).fit(toy_semifl(), ToyData())


def test_poisoned_images_get_confident_wrong_labels_and_change_little(tmp_path: Path) -> None:
    algorithm, data = toy_semifl(server_epochs=20), ToyData()
    trainer = toy_trainer(tmp_path, max_rounds=4)
    trainer.fit(algorithm, data)
    own, attack = trainer.local_data(0), PseudoLabelPoison(radius=0.2)
    before = algorithm.server.model()["network.classifier.weight"].clone()
    poisoned = attack.poison(own, algorithm)
    change = (poisoned.images.int() - own.images.int()).abs()
    assert 0 < int(change[own.unlabeled].max()) <= 0.2 * 255
    assert not change[[i for i in range(len(change)) if i not in own.unlabeled.tolist()]].any()
    load_state(algorithm, algorithm.server.model())
    with evaluating(algorithm):
        clean = algorithm(own.plain(own.unlabeled)).softmax(1)
        wrong = algorithm(poisoned.plain(own.unlabeled)).softmax(1)
    assert torch.equal(algorithm.server.model()["network.classifier.weight"], before)
    assert (wrong.argmax(1) == (clean.argmax(1) + 1) % 3).double().mean() > 0.9
    assert float(wrong.max(1).values.mean()) > 0.8


def test_only_attackers_train_on_poisoned_images(tmp_path: Path) -> None:
    found, attack = Labels(), PseudoLabelPoison(0.5)
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, updates=[attack], callbacks=found)
    trainer.fit(toy_semifl(), ToyData())
    for client, images in found.images.items():
        own = trainer.local_data(client)
        assert torch.equal(images, own.images[own.unlabeled]) is (client not in attack.attackers(trainer.seed, 4))


@pytest.mark.parametrize("attack", [PseudoLabelPoison(0.5), ALIE(0.5)])
def test_attacks_are_the_same_on_two_ranks(attack: Any, tmp_path: Path) -> None:
    models = []
    for ranks in (1, 2):
        algorithm = toy_semifl()
        settings = {"updates": [attack], "clients_per_round": 4}
        toy_trainer(tmp_path / str(ranks), **settings, **forked(ranks)).fit(algorithm, ToyData())
        models.append(weights(algorithm))
    assert_same(*models)


def test_the_quarantine_rejects_an_attacker_that_moves_far(tmp_path: Path) -> None:
    attack = SignFlip(0.25, -1e4)
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, updates=[attack, Quarantine()])
    trainer.fit(toy_fedavg(), labeled_clients())
    (attacker,) = attack.attackers(trainer.seed, 4)
    assert {c for c, outcome in trainer.participation.items() if outcome == "rejected"} == {attacker}


def test_an_attack_on_updates_needs_a_method_that_averages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.updates: SignFlip cannot be used with FedRGD"):
        toy_trainer(tmp_path, updates=[SignFlip()]).fit(toy_rgd(), ToyData())
