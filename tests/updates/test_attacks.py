"""Simulated attackers: what they send by hand, what they train on, and that it comes to the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.state import ClientUpdate, load_state
from lightning_fedssl.updates import Arrival, PseudoLabelPoison, Quarantine, SignFlip
from tests.algorithms.helpers import toy_rgd
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights

MODEL = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])}


def update(client: int, *values: float) -> ClientUpdate:
    w, b = torch.tensor(values[:2]).float(), torch.tensor(values[2:]).float()
    return ClientUpdate(client, {"w": w}, {"b": b}, num_samples=1, num_steps=1)


@pytest.mark.parametrize(
    ("attack", "expected"), [(SignFlip(0.5, -3), [4.0, 5.0, -3.0]), (SignFlip(0.5, 2), [-1.0, 0, 2.0])]
)
def test_an_attacker_moves_in_another_direction_and_others_do_not(attack: Any, expected: list[float]) -> None:
    attack._attackers = frozenset({0})
    trained = [Arrival(update(0, 2, 3, -1)), Arrival(update(1, 5, 6, 7))]
    false, honest = (attack.on_update(None, None, arrival, MODEL).update.model() for arrival in trained)
    assert torch.cat([*false.values()]).tolist() == pytest.approx(expected)
    assert torch.cat([*honest.values()]).tolist() == [5, 6, 7]


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


@pytest.mark.parametrize("attack", [PseudoLabelPoison(0.5), SignFlip(0.5)])
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
