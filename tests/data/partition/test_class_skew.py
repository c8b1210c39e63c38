from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedssl import sampling
from lightning_fedssl.data import ClassSkew
from lightning_fedssl.data.partition.class_skew import largest_remainder, targets
from lightning_fedssl.data.partition.federated_split import SplitRequest
from lightning_fedssl.data.partition.statistics import statistics
from tests.data.helpers import set_up


def labels_of(*sizes: int) -> torch.Tensor:
    return torch.cat([torch.full((n,), j) for j, n in enumerate(sizes)])


def dealt(r: float, num_clients: int, *sizes: int, seed: int = 0) -> np.ndarray:
    """Images per client and class, after a check that every image is dealt once."""
    labels = labels_of(*sizes)
    parts = ClassSkew(r).assign(labels, num_clients, len(sizes), sampling.rng(seed, "test"))
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))
    return np.array([labels[part].bincount(minlength=len(sizes)).tolist() for part in parts])


def half_l1(a: np.ndarray, b: np.ndarray) -> float:
    return float(abs(a / a.sum() - b / b.sum()).sum() / 2)


def test_two_users_with_60_and_40_images() -> None:
    counts = dealt(0.5, 2, 60, 40)
    assert counts.tolist() == [[48, 12], [12, 28]]
    assert half_l1(*counts) == pytest.approx(0.5)


def test_fewer_users_than_classes_own_several_each() -> None:
    """User 0 owns classes 0, 1, 30 % of all images: 10 (0.4 + 0.3 * 0.6) = 5.8 of class 0, 30 * 0.18 of class 2."""
    expected = [[5.8, 11.6, 5.4, 7.2], [4.2, 8.4, 24.6, 32.8]]
    np.testing.assert_allclose(targets(np.array([10, 20, 30, 40]), 2, 0.4), expected)
    assert abs(dealt(0.4, 2, 10, 20, 30, 40) - expected).max() < 1


def test_one_class_each_at_1_and_all_alike_at_0() -> None:
    assert dealt(1.0, 3, 12, 20, 9).tolist() == [[12, 0, 0], [0, 20, 0], [0, 0, 9]]
    assert abs(dealt(0.0, 3, 12, 21, 9) - np.array([[12, 21, 9]]) / 3).max() <= 7
    np.testing.assert_allclose(targets(np.array([30, 30, 30]), 3, 0.0), np.full((3, 3), 10))


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.integers(1, 25), st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_users_of_different_main_classes_are_r_apart_and_every_image_is_assigned(
    r: float, num_clients: int, sizes: list[int]
) -> None:
    wanted = targets(np.array(sizes), num_clients, r)
    np.testing.assert_allclose(wanted.sum(0), sizes)
    assert abs(dealt(r, num_clients, *sizes) - wanted).max() < 1
    for a in range(num_clients):
        for b in range(a):
            same = num_clients >= len(sizes) and a % len(sizes) == b % len(sizes)
            assert half_l1(wanted[a], wanted[b]) == pytest.approx(0 if same else r, abs=1e-9)


@pytest.mark.parametrize(
    ("num_clients", "factor"), [(2, 1), (10, 1), (20, 0.947), (30, 0.931), (100, 0.909), (16, 0.95)]
)
def test_measured_skew_is_nominal_times_the_factor_of_alike_pairs(num_clients: int, factor: float) -> None:
    """20 users, 10 classes: m_j = 2, and the factor is 1 - 10 * 2 * 1 / (20 * 19) = 0.947."""
    labels = torch.arange(101_000) % 10
    split = ClassSkew(0.4).split(SplitRequest(labels, 10, num_clients, 1000, "server"), sampling.rng(0, "partition"))
    measured = statistics(split, labels, 10).class_skew
    assert measured == pytest.approx(0.4 * factor, abs=0.01)
    assert labels[split.server_labeled].bincount().tolist() == [100] * 10


def test_rounding_keeps_the_sum_and_settles_ties_by_lot() -> None:
    """Four times 1.5 is rounded to two 1s and two 2s; a rounding error does not make an integer a fraction."""
    target = np.array([1.5, 1.5, 1.5, 1.5])
    drawn = {tuple(largest_remainder(target, 6, sampling.rng(seed, "ties"))) for seed in range(20)}
    assert all(sum(counts) == 6 and set(counts) == {1, 2} for counts in drawn)
    assert len(drawn) > 1
    almost = np.array([48.000000000000007, 11.999999999999993])
    assert largest_remainder(almost, 60, sampling.rng(0)).tolist() == [48, 12]


def test_the_server_can_hold_labelled_images_beside_labelled_clients() -> None:
    data = set_up("digits", num_labels="all", label_location="clients", partition=ClassSkew(0.3, server_images=50))
    assert len(data.split.server_labeled) == 50
    assert data.true_labels(data.split.server_labeled).bincount().tolist() == [5] * 10
    held = torch.cat([data.split.server_labeled, *(client.labeled for client in data.split.clients)])
    assert len(held.unique()) == len(held)
    assert all(len(client.unlabeled) == 0 for client in data.split.clients)
