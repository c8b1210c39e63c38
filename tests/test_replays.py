"""Runs of the methods' authors, replayed from numbers: see benchmarks/replays.md for what was compared, and how.

Every number in ``tests/replays/*.json`` was measured with the authors' code; none of that code is here.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data import FederatedDataModule, Partition
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import WideResNet
from lightning_fedssl.schedules import Cosine
from lightning_fedssl.state import Batch, ClientUpdate
from tests.toy import toy_trainer

REPLAYS = Path(__file__).parent / "replays"
CLOSE = 1e-11
"""Of projections of weights: sums of thousands of products of numbers around 1, in float64."""

# What both sides made from NumPy's RandomState, whose streams are frozen for good: images, first weights, projections.


def images(seed: int, per_class: int) -> ImageSplit:
    """Ten classes of 32 x 32 colour images: one noise pattern per class, and noise of each image."""
    noise = np.random.RandomState(seed)
    pattern = np.random.RandomState(1).randint(40, 216, (10, 32, 32, 3))
    labels = np.arange(10 * per_class) % 10
    pixels = np.clip(pattern[labels] + noise.randint(-40, 41, (len(labels), 32, 32, 3)), 0, 255)
    return ImageSplit(torch.from_numpy(pixels.astype(np.uint8)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))


def first_weights(network: torch.nn.Module) -> None:
    """Set the weights, in the order of their names."""
    draw = np.random.RandomState(2)
    for name, p in sorted(network.named_parameters()):
        value = draw.standard_normal(tuple(p.shape))
        if p.dim() == 4:
            value = value * (2 / (p.shape[0] * p.shape[2] * p.shape[3])) ** 0.5
        else:
            value = 1 + 0.1 * value if name.endswith("weight") and p.dim() == 1 else 0.03 * value
        p.data = torch.from_numpy(value)


def projections(state: State) -> dict[str, list[float]]:
    """Two products of every tensor with random vectors: equal for equal tensors, and practically only for these."""
    draw, found = np.random.RandomState(3), {}
    for name in sorted(name.removeprefix("network.") for name in state):
        flat = state[f"network.{name}"].detach().double().flatten().numpy()
        found[name] = [float(flat @ draw.standard_normal(len(flat))) for _ in range(2)]
    return found


def assert_close(state: State, expected: dict[str, list[float]]) -> None:
    found = projections(state)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=CLOSE, rel=CLOSE), name


def weak(x: Tensor) -> Tensor:
    """The recorded run's weak view: one pixel to the right."""
    return torch.roll(x, 1, -1)


def strong(x: Tensor) -> Tensor:
    """Its strong view: upside down."""
    return x.flip(-2)


class Given(Partition):
    """The split of the recorded run."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def split(self, asked: Any, generator: Any) -> FederatedSplit:
        none = torch.zeros(0, dtype=torch.int64)
        clients = [ClientIndices(none, torch.tensor(sorted(part))) for part in self.record["split"]]
        return FederatedSplit(asked.seed, torch.tensor(sorted(self.record["labeled"])), clients)


class RecordedData(FederatedDataModule):
    """100 images to train and 40 to test."""

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        return self.spec, images(11, 10), images(12, 4)


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
    record = json.loads((REPLAYS / "semifl.json").read_text())
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
    recorded = [client for number in rounds.values() for client in number["clients"].values()]
    assert compared.clients == sum(bool(client["steps"]) for client in recorded) > 0
    shares = [np.mean(np.array(client["confidence"]) >= settings["threshold"]) for client in recorded]
    assert min(shares) < 0.5 < max(shares)  # both kinds of clients were compared: few and many confident images
