"""What the replays of the authors' runs share: data and weights that both sides make from frozen random streams.

See benchmarks/replays.md. NumPy promises that the streams of ``RandomState`` never change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data import FederatedDataModule, Partition
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.state import ClientUpdate

REPLAYS = Path(__file__).parent / "replays"
CLOSE = 1e-11
"""Of projections of weights: sums of thousands of products of numbers around 1, in float64."""


def recorded(name: str) -> dict[str, Any]:
    """The numbers of a run of a method's authors."""
    found: dict[str, Any] = json.loads((REPLAYS / f"{name}.json").read_text())
    return found


# What both sides made from NumPy's RandomState, whose streams are frozen for good: images, first weights, projections.


def images(seed: int, per_class: int) -> ImageSplit:
    """Ten classes of 32 x 32 colour images: one noise pattern per class, and noise of each image."""
    noise = np.random.RandomState(seed)
    pattern = np.random.RandomState(1).randint(40, 216, (10, 32, 32, 3))
    labels = np.arange(10 * per_class) % 10
    pixels = np.clip(pattern[labels] + noise.randint(-40, 41, (len(labels), 32, 32, 3)), 0, 255)
    return ImageSplit(torch.from_numpy(pixels.astype(np.uint8)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))


def first_weights(network: torch.nn.Module, linear: float = 0.03, conv: float = 1.0) -> None:
    """Set the weights, in the order of their names.

    Args:
        network: Gets 64-bit weights.
        linear: The standard deviation of the weights of linear layers.
        conv: That of convolutions, as a multiple of He's.
    """
    draw = np.random.RandomState(2)
    for name, p in sorted(network.named_parameters()):
        value = draw.standard_normal(tuple(p.shape))
        if p.dim() == 4:
            value = value * conv * (2 / (p.shape[0] * p.shape[2] * p.shape[3])) ** 0.5
        elif p.dim() == 2:
            value = linear * value
        else:
            value = 1 + 0.1 * value if name.endswith("weight") else 0.03 * value
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


def fingerprint(state: State) -> list[float]:
    """Two products of all numbers of a state, in the order of the tensors' names, with random vectors."""
    names = sorted(state, key=lambda name: name.removeprefix("network."))
    flat = torch.cat([state[name].detach().double().flatten() for name in names]).numpy()
    return [float(flat @ np.random.RandomState(3 + k).standard_normal(len(flat))) for k in range(2)]


def drawn_rows(participant: int, round_index: int, step: int, pool: Tensor, size: int) -> Tensor:
    """Different images of a pool, ``(size,)``, as both sides draw them for a step of a participant."""
    order = np.random.RandomState(1000 * participant + 10 * round_index + step).permutation(len(pool))
    return pool[torch.from_numpy(order[:size])]


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
        labeled = torch.tensor(sorted(self.record["labeled"]))
        own = labeled.chunk(asked.num_clients) if asked.label_location == "clients" else [none] * asked.num_clients
        own = [torch.tensor(part) for part in self.record.get("labeled_at", [])] or own
        parts = [torch.tensor(sorted(part)) for part in self.record["split"]]
        clients = [ClientIndices(mine, part) for mine, part in zip(own, parts, strict=True)]
        return FederatedSplit(asked.seed, none if asked.label_location == "clients" else labeled, clients)


class RecordedData(FederatedDataModule):
    """100 images to train and 40 to test."""

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        return self.spec, images(11, 10), images(12, 4)


@dataclass(frozen=True)
class RecordedOrders(LocalData):
    """The data of a party that visits its images in the recorded order, and sees them in the recorded views.

    Attributes:
        orders: The images of every epoch, by round, party and purpose. A purpose of a method's own is an order of all
            images that the epoch visits.
    """

    orders: dict[str, Any] = field(default_factory=dict)

    def permutation(self, count: int, purpose: str, *more: int) -> Tensor:
        recorded = self.orders[str(self.round)][str(self.party)].get(purpose)
        if recorded is None:  # of a callback
            return super().permutation(count, purpose, *more)
        images = torch.tensor(recorded[more[0]])
        pools = {"labeled": self.labeled, "unlabeled": self.unlabeled}
        return (images[:, None] == pools.get(purpose, images.sort().values)).nonzero()[:, 1]


class DataInRecordedOrder(RecordedData):
    """Parties visit their images in the order of the recorded run, which is part of its record."""

    def local_data(self, party: int, round_index: int, dtype: torch.dtype = torch.float32) -> LocalData:
        local = super().local_data(party, round_index, dtype)
        plain = local.views.plain
        views = Views(plain, lambda x, keys: weak(plain(x, keys)), lambda x, keys: strong(plain(x, keys)))
        record = cast(Given, self.partition).record
        return RecordedOrders(**vars(replace(local, views=views)), orders=record["orders"])


class ComparedRounds(FederatedCallback):
    """Compares every client's weights, and after a round those of the global model, its statistics and its accuracy."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.clients = 0

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]["clients"][str(update.client)]
        assert fingerprint(update.parameters) == pytest.approx(theirs["weights"], abs=CLOSE, rel=CLOSE)
        assert algorithm.client_weight(update) == pytest.approx(theirs["weight"], rel=1e-13)
        self.clients += 1

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        assert fingerprint(algorithm.server.parameters) == pytest.approx(theirs["weights"], abs=CLOSE, rel=CLOSE)
        statistics = {name: t for name, t in algorithm.server.buffers.items() if "running" in name}
        assert bool(statistics) == ("buffers" in theirs)
        assert not statistics or fingerprint(statistics) == pytest.approx(theirs["buffers"], abs=CLOSE, rel=CLOSE)
        assert metrics["val/accuracy"] == pytest.approx(theirs["accuracy"])
        assert metrics["val/loss"] == pytest.approx(theirs["loss"], rel=1e-12)
