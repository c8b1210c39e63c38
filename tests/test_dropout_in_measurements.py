"""Dropout that a network does not switch off in evaluation mode: what callbacks measure draws from keys, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.algorithms import FedAvg, FedSHVR
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import (
    ClientEvaluation,
    GroupQuality,
    LossLandscape,
    OptimalityGap,
    PseudoLabelQuality,
    StageLosses,
    StaticBatchNorm,
)
from lightning_fedssl.state import ClientUpdate
from tests.test_diversity import toy_rgd
from tests.test_fed_shvr import toy_shvr
from tests.test_fedmatch import toy_fedmatch
from tests.test_keyed_dropout import AlwaysDrops
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights


class DropsAfterNorm(nn.Module):
    """Has static batch norm, and forgets to switch dropout off in evaluation mode."""

    def __init__(self, num_classes: int, in_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.norm.track_running_stats = False
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(F.dropout(x)).flatten(1))
        return logits


class AfterTraining(FedAvg):
    """Computes with dropout when a client has trained."""

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        self.clients.put(update.client, "after", {"z": F.dropout(torch.ones(20))})
        return super().on_client_end(update)


@pytest.mark.parametrize(
    ("make", "location"),
    [
        (toy_fedmatch, "server"),
        (toy_fedmatch, "clients"),
        (partial(AfterTraining, num_classes=3, in_shape=(1, 8, 8)), "clients"),
    ],
)
def test_dropout_after_training_does_not_depend_on_torch_s_state(tmp_path: Path, make: Any, location: Any) -> None:
    found = []
    for seed in (0, 1):
        algorithm = make(network=AlwaysDrops)
        trainer = toy_trainer(tmp_path, max_rounds=1, logger=False, callbacks=[Reseed(seed)])
        trainer.fit(algorithm, ToyData(validation=0.2, num_labels=24, label_location=location))
        kept = algorithm.clients.state_dict()
        states = {f"{k} {name}": t for k, of_client in kept.items() for name, t in of_client.items()}
        found.append({**states, **weights(algorithm), **algorithm.server.extra.get("rate", {})})
    assert_same(*found)


class Reseed(FederatedCallback):
    """Sets torch's generator, which the weights of a run may have been drawn from."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        torch.manual_seed(self.seed)


@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (partial(toy_semifl, network=AlwaysDrops), lambda: [ClientEvaluation(before_and_after=True), StageLosses()]),
        (partial(toy_rgd, network=AlwaysDrops), lambda: [PseudoLabelQuality(), GroupQuality()]),
        (partial(toy_shvr, network=AlwaysDrops), lambda: [OptimalityGap()]),
        (partial(toy_semifl, network=DropsAfterNorm), lambda: [StaticBatchNorm("server")]),
        (partial(toy_semifl, network=DropsAfterNorm), lambda: [StaticBatchNorm("moments")]),
    ],
)
def test_dropout_in_measurements_of_callbacks_does_not_depend_on_torch_s_state(
    tmp_path: Path, make: Any, callbacks: Any
) -> None:
    found = []
    for seed in (0, 1):
        algorithm = make()
        trainer = toy_trainer(tmp_path, max_rounds=1, logger=False, callbacks=[Reseed(seed), *callbacks()])
        location: Any = "clients" if isinstance(algorithm, FedSHVR) else "server"
        trainer.fit(algorithm, ToyData(validation=0.2, num_labels=24, label_location=location))
        scalars = {k: v for k, v in trainer.callback_metrics.items() if not k.startswith("time/")}
        found.append({**scalars, **weights(algorithm)})
    assert_same(*found)


def test_a_loss_landscape_does_not_depend_on_torch_s_state(tmp_path: Path) -> None:
    algorithm, landscape = toy_shvr(network=AlwaysDrops), LossLandscape(points=3)
    trainer = toy_trainer(tmp_path, max_rounds=1, logger=False, callbacks=[landscape])
    trainer.fit(algorithm, ToyData(validation=0.2, num_labels=24, label_location="clients"))
    torch.manual_seed(0)
    surface = landscape.surface(trainer, algorithm)
    torch.manual_seed(1)
    assert (landscape.surface(trainer, algorithm) == surface).all()
