"""FedMatch's partition: ten types of clients, each with a class of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data import ClientTypes, FederatedSplit
from lightning_fedssl.data.partition.federated_split import SplitRequest

LABELS = torch.arange(6000) % 10


def split(
    num_labels: int | str = 500, location: Any = "clients", clients: int = 20, labels: Tensor = LABELS
) -> FederatedSplit:
    generator = sampling.rng(0, "partition")
    return ClientTypes().split(SplitRequest(labels, 10, clients, num_labels, location), generator)  # type: ignore[arg-type]


def test_rows_are_the_published_ones_shifted() -> None:
    """0.5 + 2 * 0.15 (neighbours) + 0.02 (opposite) + 6 * 0.03 = 1."""
    rows = ClientTypes().probabilities(10)
    assert rows[0].tolist() == pytest.approx([0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15])
    for shift in range(10):
        assert np.array_equal(rows[shift], np.roll(rows[0], shift))
    assert rows.sum(axis=1) == pytest.approx(np.ones(10))
    distance = np.abs(rows[:, None] - rows[None]).sum(axis=2) / 2
    assert distance.sum() / 90 == pytest.approx(0.64, abs=0.01)
    assert ClientTypes().probabilities(3).sum(axis=1) == pytest.approx(np.ones(3))


def test_every_image_is_assigned_at_most_once_and_labels_are_balanced_at_every_client() -> None:
    drawn = split()
    everyone = torch.cat([part for client in drawn.clients for part in client])
    assert len(everyone.unique()) == len(everyone)
    for client in drawn.clients:
        assert set(torch.bincount(LABELS[client.labeled], minlength=10).tolist()) == {2, 3}
        assert len(client.labeled) == 25
    even = split(1000)
    assert all(torch.bincount(LABELS[c.labeled]).tolist() == [5] * 10 for c in even.clients)
    assert len(drawn.server_labeled) == 0


def test_a_client_s_images_are_mostly_of_its_class() -> None:
    for location, labels in (("clients", 1000), ("server", 200)):
        drawn = split(labels, location)
        for number, client in enumerate(drawn.clients):
            shares = torch.bincount(LABELS[client.unlabeled], minlength=10) / len(client.unlabeled)
            assert int(shares.argmax()) == number % 10
            assert 0.35 < float(shares.max()) < 0.65
        assert len(drawn.server_labeled) == (200 if location == "server" else 0)
        sizes = [len(client.unlabeled) for client in drawn.clients]
        assert max(sizes) <= (6000 - labels) // 20
        assert min(sizes) > 0.8 * (6000 - labels) // 20


def test_counts_of_the_published_setting() -> None:
    """5,000 labels / 100 = 50 each; (56,000 - 5,000) / 100 = 510, and (56,000 - 1,000) / 100 = 550 unlabelled ones."""
    labels = torch.arange(56_000) % 10
    at_clients, at_server = split(5000, clients=100, labels=labels), split(1000, "server", 100, labels)
    assert {len(c.labeled) for c in at_clients.clients} == {50}
    assert max(len(c.unlabeled) for c in at_clients.clients) == 510
    assert max(len(c.unlabeled) for c in at_server.clients) == 550


def test_too_many_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.num_labels: .* 700 labelled samples of class 0, .* only 600"):
        split(7000)
