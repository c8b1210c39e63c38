"""Runs of the methods' authors, replayed from numbers: see benchmarks/replays.md for what was compared, and how.

Every number in ``tests/replays/*.json`` was measured with the authors' code; none of that code is here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedRGD, SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN, WideResNet
from lightning_fedssl.schedules import Cosine, FractionalCosine
from lightning_fedssl.state import Batch, ClientUpdate
from tests.replay import (
    CLOSE,
    Given,
    RecordedData,
    assert_close,
    drawn_rows,
    fingerprint,
    first_weights,
    images,
    recorded,
    strong,
    weak,
)
from tests.toy import toy_trainer


class ReplayedSemiFL(SemiFL):
    """SemiFL on recorded batches. The labels are its own; its own numbers of steps are compared with the recorded."""

    record: dict[str, Any]

    def label_images(self, data: LocalData) -> PseudoLabels:
        self.eval()
        with torch.no_grad():
            pseudo = pseudo_label(self(weak(data.plain(data.unlabeled))), self.threshold)
        theirs = self.record["rounds"][str(data.round)]["clients"][str(data.party)]
        order = torch.tensor(theirs["images"]).argsort()
        assert torch.tensor(theirs["images"])[order].tolist() == data.unlabeled.tolist()
        assert torch.tensor(theirs["labels"])[order].tolist() == pseudo.labels.tolist()
        confidence = torch.tensor(theirs["confidence"], dtype=torch.float64)[order]
        torch.testing.assert_close(pseudo.confidence, confidence, rtol=0, atol=1e-13)
        assert torch.equal(pseudo.mask, confidence >= self.threshold)
        return pseudo

    def on_client_start(self, data: LocalData) -> LocalWork:
        own = super().on_client_start(data)
        steps = self.record["rounds"][str(data.round)]["clients"][str(data.party)]["steps"]
        assert own.num_steps == len(steps)
        assert [len(batch["y_fix"]) for batch in own] == [len(step["fix"]) for step in steps]

        def batch(number: int) -> Batch:
            step = steps[number]
            fix, mix = (data.plain(torch.tensor(step[name])) for name in ("fix", "mix"))
            ratio = torch.tensor(step["ratio"], dtype=torch.float64).expand(len(fix))
            labels = {name: torch.tensor(step[name]) for name in ("y_fix", "y_mix")}
            return {"x_strong": strong(fix), "x_weak": weak(fix), "x_mix": weak(mix), "ratio": ratio, **labels}

        return LocalWork(own.num_samples, len(steps), batch, own.pseudo_labels)

    def on_server_start(self, data: LocalData) -> LocalWork:
        own, steps = super().on_server_start(data), self.record["rounds"][str(data.round)]["server"]
        assert own.num_steps == len(steps)

        def batch(number: int) -> Batch:
            rows = torch.tensor(steps[number]["x"])
            labels = images(11, 10).labels
            return {"x": data.plain(rows), "y": labels[rows]}

        return LocalWork(own.num_samples, len(steps), batch)


class Compared(FederatedCallback):
    """Compares every client's weights, and the global model's after aggregation and after fine-tuning."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.clients = 0

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]["clients"][str(update.client)]
        assert_close(update.parameters, theirs["weights"])
        self.clients += 1

    def on_server_phase_start(self, trainer: Any, algorithm: Any) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        assert_close(algorithm.server.parameters, theirs["aggregated"])

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        assert_close(algorithm.server.parameters, theirs["weights"])
        assert_close(algorithm.server.buffers, theirs["sbn"])
        assert metrics["lr"] == pytest.approx(theirs["lr"], rel=1e-14)
        assert 100 * metrics["val/accuracy"] == pytest.approx(theirs["accuracy"])
        assert metrics["val/loss"] == pytest.approx(theirs["loss"], rel=1e-12)


def test_semifl_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds in float64: labels, steps, every client's weights, aggregation, fine-tuning, sBN, rate, accuracy."""
    record = recorded("semifl")
    settings, rounds = record["settings"], record["rounds"]
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> WideResNet:
        built = WideResNet(num_classes, in_shape, depth=10, widen_factor=1, norm="static_batch").double()
        first_weights(built)
        return built

    algorithm = ReplayedSemiFL(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=Cosine(),
        threshold=settings["threshold"],
        client_epochs=settings["epochs"],
        server_epochs=settings["epochs"],
        gradient_clip_norm=1.0,
        server_momentum=0.5,
        client_weighting="uniform",
        keep_client_optimizer=True,
        keep_server_optimizer=True,
    )
    algorithm.record, compared = record, Compared(record)
    data = RecordedData(
        "cifar10", num_clients=settings["clients"], num_labels=settings["labels"], partition=Given(record),
        server_batch_size=10, client_batch_size=10, validation="test",
    )  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=settings["rounds"], clients_per_round=settings["clients_per_round"], logger=False,
        precision="64-true", callbacks=[StaticBatchNorm("pooled", "batches", batch_size=30), compared],
    )  # fmt: skip
    trainer.fit(algorithm, data)
    clients = [client for number in rounds.values() for client in number["clients"].values()]
    assert compared.clients == sum(bool(client["steps"]) for client in clients) > 0
    shares = [np.mean(np.array(client["confidence"]) >= settings["threshold"]) for client in clients]
    assert min(shares) < 0.5 < max(shares)  # both kinds of clients were compared: few and many confident images


class ReplayedFedRGD(FedRGD):
    """FedRGD on the recorded run's batches: 8 labelled images at a server, 6 of a user's 8 images."""

    def on_server_start(self, data: LocalData) -> LocalWork:
        own, labels = super().on_server_start(data), images(11, 10).labels
        replica, number = self.replica, data.round - self.replica  # a second phase has the next round's number

        def batch(step: int) -> Batch:
            rows = drawn_rows(100 + replica, number, step, data.labeled, 8)
            return {"x": weak(data.plain(rows)), "y": labels[rows]}

        return LocalWork(own.num_samples, own.num_steps, batch)

    def on_client_start(self, data: LocalData) -> LocalWork:
        own = super().on_client_start(data)

        def batch(step: int) -> Batch:
            x = data.plain(drawn_rows(data.party + 1, data.round, step, data.unlabeled, 6))
            return {"x_weak": weak(x), "x_strong": strong(x)}

        return LocalWork(own.num_samples, own.num_steps, batch)


class ComparedGroups(FederatedCallback):
    """Compares what every user trained, both servers' models, the group means and the average."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.users = 0
        self.mask_rates: list[float] = []

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        user = self.record["rounds"][str(trainer.round_index)]["users"][str(algorithm.slot_of[update.client])]
        assert fingerprint(update.parameters) == pytest.approx(user["weights"], abs=CLOSE, rel=CLOSE)
        buffers = {name: t for name, t in update.buffers.items() if t.is_floating_point()}
        assert fingerprint(buffers) == pytest.approx(user["buffers"], abs=CLOSE, rel=CLOSE)
        self.users += 1

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        names = list(algorithm.server.parameters)
        for ours, server in zip(algorithm._servers, theirs["servers"], strict=True):
            assert fingerprint({name: ours[name] for name in names}) == pytest.approx(server, abs=CLOSE, rel=CLOSE)
        for ours, group in zip(algorithm.group_means(), theirs["groups"], strict=True):
            assert fingerprint(ours) == pytest.approx(group, abs=CLOSE, rel=CLOSE)
        assert fingerprint(algorithm.server.parameters) == pytest.approx(theirs["average"], abs=CLOSE, rel=CLOSE)
        buffers = {name: t for name, t in algorithm.server.buffers.items() if t.is_floating_point()}
        assert fingerprint(buffers) == pytest.approx(theirs["buffers"], abs=CLOSE, rel=CLOSE)
        assert metrics["lr"] == pytest.approx(theirs["lr"], rel=1e-14)
        self.mask_rates.append(metrics["client/mask_rate"])


def test_fedrgd_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds of ten users in two groups: every user, both servers, the group means, the average, statistics."""
    record = recorded("fedrgd")
    rounds, steps = record["rounds"], record["settings"]["steps"]
    record |= {"labeled": list(range(20)), "split": [list(range(20 + 8 * user, 28 + 8 * user)) for user in range(10)]}
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> CNN:
        built = CNN(num_classes, in_shape, width=4, norm="batch").double()
        first_weights(built, linear=1.9)
        return built

    algorithm = ReplayedFedRGD(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        schedule=FractionalCosine(),
        groups=2,
        regroup="slots",
        server_replicas="per_group",
        local_steps=steps,
        threshold=0.95,
    )
    compared = ComparedGroups(record)
    data = RecordedData(
        "svhn", num_clients=10, num_labels=20, partition=Given(record), server_batch_size=8, client_batch_size=6,
        validation="test",
    )  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=len(rounds), clients_per_round=10, logger=False, precision="64-true", callbacks=[compared]
    )
    trainer.fit(algorithm, data)
    assert compared.users == 40
    assert compared.mask_rates[0] > 0.5 > compared.mask_rates[1] > 0  # many and few confident images were compared
