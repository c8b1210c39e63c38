"""Class skew and summary of a partition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedssl.data.partition.base import Dirichlet, Iid, Shards
from lightning_fedssl.data.partition.statistics import statistics
from tests.data.partition.helpers import CIFAR_LABELS, draw, hand_split


def test_statistics_by_hand() -> None:
    """Pairs of class shares (1, 0, 0), (1/2, 1/2, 0), (0, 2/3, 1/3): half the L1 distances are 1/2, 1 and 1/2."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    stats = statistics(hand_split([0, 1], [2, 3], [4, 5, 6], [], server=[7]), labels, 3)
    assert stats.class_counts.tolist() == [[2, 0, 0], [1, 1, 0], [0, 2, 1], [0, 0, 0]]
    assert stats.sizes.tolist() == [2, 2, 3, 0]
    assert stats.classes_per_client.tolist() == [1, 2, 2, 0]
    assert stats.server_class_counts.tolist() == [0, 0, 1]
    assert stats.class_skew == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)
    entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
    assert stats.effective_classes == pytest.approx((1 + 2 + np.exp(entropy)) / 3)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(2, 6), st.integers(0, 1000))
def test_class_skew_equals_the_sum_over_pairs(num_clients: int, num_classes: int, seed: int) -> None:
    labels = torch.arange(20 * num_clients) % num_classes
    split = draw(Dirichlet(0.3, 1), labels, num_clients, "all", "clients", seed, num_classes)
    stats = statistics(split, labels, num_classes)
    pairs = [float((a - b).abs().sum() / 2) for a, b in itertools.combinations(stats.histograms, 2)]
    assert stats.class_skew == pytest.approx(np.mean(pairs))


def test_summary_is_a_few_plain_lines() -> None:
    server = statistics(draw(Shards(2), CIFAR_LABELS, 100, 4000), CIFAR_LABELS, 10).summary()
    lines = server.splitlines()
    assert lines[0] == "100 clients: 46,000 images, 460 each"
    assert lines[1] == "server: 4,000 labelled images, 400 of each class"
    assert lines[2].startswith("classes per client: 1 to 2, effectively 1.9")
    assert len(lines) == 5
    clients = statistics(draw(Iid(), CIFAR_LABELS, 1, 40, "clients"), CIFAR_LABELS, 10).summary()
    assert clients.startswith("1 client: 50,000 images, 50,000 each")
    assert "clients: 40 labelled images, 40 at each client" in clients


def test_a_summary_bears_empty_clients() -> None:
    labels = torch.arange(50) % 10
    stats = statistics(draw(Iid(), labels, 3, "all"), labels, 10)
    assert stats.summary().startswith("3 clients: 0 images, 0 each")
    assert stats.class_skew == stats.effective_classes == 0


def test_unknown_classes_are_not_called_alike() -> None:
    labels = torch.tensor([0, 1, -1, -1, -1, 1])
    unknown = statistics(hand_split([2], [3, 4], server=[0, 1]), labels, 2)
    assert "the classes of the clients' images are not known" in unknown.summary()
    assert "alike" not in unknown.summary()
    assert unknown.summary().splitlines()[2] == "of unknown class: 3 images at the clients"
    partly = statistics(hand_split([0, 2], [1, 3]), labels, 2)
    assert "class skew R = 1.000 (0: all clients alike, 1: no class in common) of known class" in partly.summary()
