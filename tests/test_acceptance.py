"""A rejected update leaves no trace: not in the average, and not in the persistent state of its client."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import (
    ClientEvaluation,
    ClientHeatMaps,
    GradientDiversity,
    LocalSteps,
    LossLandscape,
    PseudoLabelGallery,
    client_pictures,
)
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import ClientUpdate
from tests.algorithms.helpers import METHODS, STATEFUL, toy_shvr, uneven_clients
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights

POISONED_ROUND = 2


def with_nan(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(t, math.nan) if t.is_floating_point() else t for name, t in state.items()}


class Poison(FederatedCallback):
    """The first client of round 2 goes wrong. Notes the state of all clients, or slots, after each round.

    Its batches become NaN, as an overflow would make them, so that its weights and its optimizer's state do too. In
    split learning that would reach the server's part of the network, so there the update alone is spoilt.

    Args:
        max_steps: Steps that this client makes at most.
    """

    def __init__(self, max_steps: int | None = None) -> None:
        self.max_steps = max_steps
        self.kept: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.owner = -1

    def on_fit_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        start, end = algorithm.on_client_start, algorithm.on_client_end

        def poisoned(client: int) -> bool:
            return bool(trainer.round_index == POISONED_ROUND and client == trainer.cohort[0])

        def on_client_start(data: LocalData) -> LocalWork:
            work = start(data)
            if not poisoned(data.party):
                return work
            return replace(work, batch=lambda step: with_nan(work.batch(step))).limited(self.max_steps)

        def on_client_end(update: ClientUpdate) -> ClientUpdate:
            update = end(update)
            return replace(update, parameters=with_nan(update.parameters)) if poisoned(update.client) else update

        if isinstance(algorithm, JointAlgorithm):
            algorithm.on_client_end = on_client_end  # type: ignore[method-assign]
        else:
            algorithm.on_client_start = on_client_start  # type: ignore[method-assign]

    def on_round_end(self, trainer: Any, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        self.kept[trainer.round_index] = {owner: {**algorithm.clients.of(owner)} for owner in range(4)}
        if trainer.round_index == POISONED_ROUND:
            self.owner = algorithm.state_owner(trainer.cohort[0])
            assert metrics["client/refused"] == 1


TRAINERS: dict[str, dict[str, Any]] = {
    "one after another": {"clients_at_once": 1},
    "stacked": {"clients_at_once": 2},
}
SKIPPED = {"semi_sfl", "semi_sfl_adaptive", "semi_sfl_momentum", "fedswitch_sl"}
CASES = [
    (name, trainer) for name in STATEFUL for trainer in TRAINERS if trainer != "static buffers" or name not in SKIPPED
]


@pytest.mark.parametrize(("name", "trainer"), CASES)
def test_the_state_of_a_rejected_client_is_that_of_the_round_before(tmp_path: Path, name: str, trainer: str) -> None:
    make, data = METHODS[name]
    algorithm, poison = make(), Poison()
    toy_trainer(tmp_path, max_rounds=3, clients_per_round=4, logger=False, callbacks=poison, **TRAINERS[trainer]).fit(
        algorithm, data()
    )
    before, after, later = (poison.kept[round_index] for round_index in (1, 2, 3))
    assert before[poison.owner]
    assert_same(after[poison.owner], before[poison.owner])
    others = [owner for owner in range(4) if owner != poison.owner and before[owner]]
    changed = [owner for owner in others if any(not torch.equal(t, after[owner][n]) for n, t in before[owner].items())]
    assert changed or not others, "accepted clients go on"
    assert all(t.isfinite().all() for kept in later.values() for t in kept.values() if t.is_floating_point())


class Absent(FederatedCallback):
    """The first client of round 2 skips the round."""

    def on_fit_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        start: Callable[[LocalData], LocalWork] = algorithm.on_client_start

        def on_client_start(data: LocalData) -> LocalWork:
            absent = trainer.round_index == POISONED_ROUND and data.party == trainer.cohort[0]
            return start(data).limited(0) if absent else start(data)

        algorithm.on_client_start = on_client_start  # type: ignore[method-assign]


def test_a_rejected_update_leaves_the_model_as_if_the_client_had_not_been_drawn(tmp_path: Path) -> None:
    results = []
    for callback in (Poison(), Absent()):
        algorithm = toy_fedavg(keep_client_optimizer=True, server_momentum=0.5)
        toy_trainer(tmp_path, logger=False, callbacks=callback).fit(algorithm, labeled_clients())
        results.append({**weights(algorithm), **algorithm.server.momentum})
    assert_same(*results)


class PseudoLabelsOfRound2(FederatedCallback):
    """Keeps the confident pseudo-labels of every client in the poisoned round."""

    def __init__(self) -> None:
        self.labels: dict[int, Tensor] = {}

    def on_client_start(self, trainer: Any, algorithm: Any, data: LocalData, work: LocalWork) -> None:
        if trainer.round_index == POISONED_ROUND and work.pseudo_labels is not None:
            self.labels[data.party] = work.pseudo_labels.labels[work.pseudo_labels.mask]


def test_pseudo_labels_of_a_rejected_client_are_in_no_scalar(tmp_path: Path) -> None:
    def fitted(*callbacks: FederatedCallback, ranks: int = 1) -> tuple[Any, float]:
        options: dict[str, Any] = {"max_rounds": POISONED_ROUND, "logger": False, **forked(ranks)}
        trainer = toy_trainer(tmp_path, callbacks=[Poison(), *callbacks], **options)
        trainer.fit(toy_semifl(), ToyData())
        return trainer, float(trainer.callback_metrics["pseudo_label/largest_class_share"])

    seen, maps = PseudoLabelsOfRound2(), ClientHeatMaps()
    trainer, share = fitted(seen, maps)
    accepted = {client for client, outcome in trainer.participation.items() if outcome != "rejected"}
    counts = torch.cat([seen.labels[client] for client in accepted]).bincount().double()
    everyone = torch.cat(list(seen.labels.values())).bincount().double()
    assert share == float(counts.max() / counts.sum())
    assert share != float(everyone.max() / everyone.sum())
    assert fitted(ranks=2)[1] == share
    cosines = maps.history["cosine_to_mean"][POISONED_ROUND]
    assert {client for client, cosine in cosines.items() if math.isfinite(cosine)} == accepted


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_and_gradients_of_a_rejected_client_are_in_no_scalar(tmp_path: Path, ranks: int) -> None:
    def measured(callback: FederatedCallback) -> dict[str, float]:
        callbacks = [callback, LocalSteps(), GradientDiversity("both")]
        options: dict[str, Any] = {"max_rounds": POISONED_ROUND, "logger": False, **forked(ranks)}
        trainer = toy_trainer(tmp_path, callbacks=callbacks, **options)
        trainer.fit(toy_fedavg(), labeled_clients())
        scalars = trainer.callback_metrics.items()
        return {name: float(value) for name, value in scalars if name.startswith(("client/steps_", "diversity/"))}

    found, expected = measured(Poison(max_steps=1)), measured(Absent())
    assert found == expected
    assert found["client/steps_min"] > 1
    assert {"diversity/update_l2_squared", "diversity/gradient_l2_squared"} <= found.keys()


def test_the_file_of_evaluations_leaves_a_rejected_client_out(tmp_path: Path) -> None:
    """The rows have the same clients as the mean."""
    callbacks = [Poison(), ClientEvaluation(before_and_after=True)]
    trainer = toy_trainer(tmp_path, max_rounds=POISONED_ROUND, callbacks=callbacks)
    trainer.fit(toy_fedavg(), labeled_clients())
    with (Path(str(trainer.log_dir)) / "client_evaluation.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == str(POISONED_ROUND)]
    after = {int(row["client"]): float(row["after_training"]) for row in rows if row["after_training"]}
    assert after.keys() == {client for client, outcome in trainer.participation.items() if outcome == "finished"}
    assert len(after) == len(trainer.cohort) - 1
    mean = float(trainer.callback_metrics["client_test/accuracy_after_training"])
    assert sum(after.values()) / len(after) == pytest.approx(mean, abs=1e-5)


def test_the_gallery_shows_no_label_of_a_rejected_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Tensor] = []
    monkeypatch.setattr(client_pictures, "show_histogram", lambda trainer, name, values: shown.append(values))
    gallery = PseudoLabelGallery(POISONED_ROUND)
    trainer = toy_trainer(tmp_path, max_rounds=POISONED_ROUND, logger=False, callbacks=[Poison(), gallery])
    trainer.fit(toy_semifl(), ToyData())
    (confidences,) = shown
    accepted = [client for client, outcome in trainer.participation.items() if outcome != "rejected"]
    assert len(accepted) == len(trainer.cohort) - 1
    assert len(confidences) == sum(len(trainer.datamodule.split.clients[client].unlabeled) for client in accepted)


def test_the_reason_is_logged_with_round_and_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        toy_trainer(tmp_path, logger=False, callbacks=Poison()).fit(
            toy_fedavg(keep_client_optimizer=True), labeled_clients()
        )
    assert "returned weights that are not finite; it is left out of the average" in caplog.text
    assert "round 2: client" in caplog.text


class Landscape(LossLandscape):  # type: ignore[misc]
    """Checks whose images it uses."""

    def on_train_end(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:
        used = sorted(client for part in trainer.gather(list(self._clients)) for client in part)
        assert used == sorted(client for client, outcome in trainer.participation.items() if outcome == "finished")
        super().on_train_end(trainer, algorithm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_landscape_is_of_the_accepted_clients(tmp_path: Path, ranks: int) -> None:
    surfaces = []
    for callback in (Poison(), Absent()):
        landscape = Landscape(points=2)
        options: dict[str, Any] = {"max_rounds": POISONED_ROUND, "precision": "64-true", **forked(ranks)}
        trainer = toy_trainer(tmp_path, callbacks=[callback, landscape], **options)
        trainer.fit(toy_shvr(), uneven_clients())
        surfaces.append(np.loadtxt(Path(str(trainer.log_dir)) / "loss_landscape.csv", delimiter=","))
    np.testing.assert_allclose(surfaces[0], surfaces[1], rtol=1e-12)
