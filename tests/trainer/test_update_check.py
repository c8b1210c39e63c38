from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.models import CNN
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer.acceptance import check_update, judge
from tests.toy import ToyData, sgd, toy_trainer

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


def changed(update: ClientUpdate, part: str, name: str, tensor: torch.Tensor) -> ClientUpdate:
    changes: Any = {part: {**getattr(update, part), name: tensor}}
    return replace(update, **changes)


def test_an_update_of_a_client_is_accepted(good: tuple[FedAvg, ClientUpdate]) -> None:
    assert check_update(*good) is None
    assert check_update(*good, most_samples=6, most_steps=2) is None


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
    good: tuple[FedAvg, ClientUpdate], part: str, name: str, tensor: torch.Tensor, reason: str
) -> None:
    algorithm, update = good
    assert re.search(reason, str(check_update(algorithm, changed(update, part, name, tensor))))


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


@pytest.mark.parametrize(("value", "rejected"), [(1e30, [3]), (50.0, [])])
def test_buffers_that_explode_are_refused_as_weights_are(value: float, rejected: list[int]) -> None:
    """``|received buffers|`` is 10, and the median of the movements 8: 1e30 exceeds ten times the median, 50 not."""
    received = {"w": torch.ones(1)}, {"v": torch.tensor([10.0])}
    values = [18.0, 18.0, 18.0, value]
    given = [ClientUpdate(k, {"w": torch.ones(1)}, {"v": torch.tensor([v])}, 1, 1) for k, v in enumerate(values)]
    found = judge(iter(given), lambda client: received, 10.0, lambda own: [own], lambda update: None)
    assert [update.client for update, reason in found if reason] == rejected


@pytest.mark.parametrize("wrong", ["shape", "weight"])
def test_the_simulation_rejects_such_updates_too(tmp_path: Path, wrong: str) -> None:
    class Wrong(FedAvg):
        def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
            if update.client != self.federation.cohort[0]:
                return update
            if wrong == "weight":
                return replace(update, num_samples=-5)
            return replace(update, parameters={name: p[:1] for name, p in update.parameters.items()})

    trainer = toy_trainer(tmp_path, max_rounds=1, logger=False)
    data = ToyData(label_location="clients", num_labels=24)
    trainer.fit(Wrong(network=partial(CNN, width=4, norm="batch"), optimizer=sgd), data)
    assert float(trainer.callback_metrics["client/refused"]) == 1
