"""Partitions that decide which classes a client has labels of."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data import ClassMismatch, LabeledClasses, Partition, Stratified
from lightning_fedssl.data.partition.class_balance import largest_remainder
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.labels_at_clients import apportion, label_quotas

MNIST_SIZES = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST = torch.repeat_interleave(torch.arange(10), torch.tensor(MNIST_SIZES))
CIFAR = torch.arange(50000) % 10


def draw(
    partition: Partition, labels: Tensor, clients: int, count: Any, seed: int = 0, classes: int = 10
) -> FederatedSplit:
    asked = SplitRequest(labels, classes, clients, count, "clients", seed)
    return partition.split(asked, sampling.rng(seed, "partition"))


def everything(split: FederatedSplit) -> Tensor:
    return torch.cat([part for client in split.clients for part in client])


def counts(split: FederatedSplit, labels: Tensor, kind: int) -> np.ndarray[Any, Any]:
    """Images of each client and class; kind 0: labelled, 1: unlabelled."""
    return np.stack([labels[client[kind]].bincount(minlength=10).numpy() for client in split.clients])


def test_stratified_mnist_has_60_and_5940_images_a_client() -> None:
    split = draw(Stratified(), MNIST, 10, 600)
    assert [(len(c.labeled), len(c.unlabeled)) for c in split.clients] == [(60, 5940)] * 10
    assert (counts(split, MNIST, 0) == 6).all()
    unlabeled = counts(split, MNIST, 1)
    assert (unlabeled.max(axis=0) - unlabeled.min(axis=0)).max() <= 1
    assert torch.equal(everything(split).sort().values, torch.arange(60000))


def test_all_labels_lie_on_the_same_partition() -> None:
    for kind in (Stratified, LabeledClasses):
        few, many = draw(kind(), MNIST, 10, 600), draw(kind(deal_as=600), MNIST, 10, "all")
        for a, b in zip(few.clients, many.clients, strict=True):
            assert torch.equal(torch.cat(a).sort().values, b.labeled)
            assert len(b.unlabeled) == 0


def test_labeled_classes_gives_two_digits_a_client_and_every_digit_60_labels() -> None:
    split = draw(LabeledClasses(), MNIST, 10, 600)
    labeled = counts(split, MNIST, 0)
    for client, row in enumerate(labeled):
        assert sorted(np.flatnonzero(row)) == sorted({2 * client % 10, (2 * client + 1) % 10})
        assert set(row[row > 0]) == {30}
    assert (labeled.sum(axis=0) == 60).all()
    assert torch.equal(everything(split).sort().values, torch.arange(60000))
    assert counts(split, MNIST, 1).std() > 1000


def test_random_pairs_differ_by_seed_and_no_class_is_left_out() -> None:
    pairs = [
        [
            np.flatnonzero(row).tolist()
            for row in counts(draw(LabeledClasses(pairs="random"), MNIST, 10, 600, s), MNIST, 0)
        ]
        for s in range(3)
    ]
    assert pairs[0] != pairs[1] != pairs[2]
    for of_seed in pairs:
        assert [len(pair) for pair in of_seed] == [2] * 10
        assert sorted(label for pair in of_seed[:5] for label in pair) == list(range(10))


def test_with_amounts_clients_differ_in_their_number_of_images_alone() -> None:
    unlabeled = counts(draw(LabeledClasses(draws="amounts", alpha=25.0), MNIST, 10, 600), MNIST, 1)
    mixtures = unlabeled / unlabeled.sum(axis=1, keepdims=True)
    assert mixtures.std(axis=0).max() < 0.001
    assert unlabeled.sum(axis=1).std() > 500


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sizes", ["dirichlet", "equal"])
def test_mismatch_ratio_is_exact_to_one_image(ratio: float, sizes: Any) -> None:
    partition = ClassMismatch(ratio, num_unlabeled=20000, sizes=sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = draw(partition, CIFAR, 40, 4000, seed=1)
    labeled, unlabeled = counts(split, CIFAR, 0), counts(split, CIFAR, 1)
    for client, (own, other) in enumerate(zip(labeled, unlabeled, strict=True)):
        classes = [(client + i) % 10 for i in range(6)]
        assert sorted(np.flatnonzero(own)) == sorted(classes)
        assert own.sum() == 100
        assert set(own[own > 0]) == {16, 17}
        outside = other.sum() - other[classes].sum()
        assert abs(outside - ratio * other.sum()) <= 0.5
    assert (labeled.sum(axis=0) == 400).all()
    assert unlabeled.sum() == 20000
    assert unlabeled.sum(axis=1).min() >= 32
    if sizes == "equal":
        assert (unlabeled.sum(axis=1) == 500).all()
    dealt = everything(split)
    assert len(dealt.unique()) == len(dealt)


def test_when_a_class_runs_out_the_others_make_up_for_it_and_it_is_said() -> None:
    labels = torch.arange(300) % 10
    with pytest.warns(UserWarning, match=r"ran out of samples: \d+ of 240 unlabelled ones"):
        split = draw(ClassMismatch(1.0, num_unlabeled=240), labels, 4, 60)
    assert counts(split, labels, 1).sum() == 240
    assert len(everything(split).unique()) == 300


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [
            Stratified(),
            LabeledClasses(3, 0.05),
            LabeledClasses(3, 0.05, "random", "amounts"),
            ClassMismatch(0.7, 4, 0.01),
            ClassMismatch(0.2, 10, 5.0),
        ]
    ),
    st.integers(1, 17),
    st.integers(0, 40),
    st.integers(0, 5),
)
def test_no_image_is_assigned_twice_and_every_image_once(
    partition: Partition, clients: int, per: int, seed: int
) -> None:
    labels = torch.arange(700) % 10
    count = min(clients * per, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        split = draw(partition, labels, clients, count, seed)
    assert torch.equal(everything(split).sort().values, torch.arange(700))
    assert len(split.server_labeled) + len(split.client_list.labeled.values) == count
    assert len({len(client.labeled) for client in split.clients}) <= 2


def test_a_client_with_more_labels_of_a_class_than_its_share_gets_no_image_twice() -> None:
    # 50 images of 4 classes, 34 labels at 7 clients: the rounding of labels and of shares differs for one client.
    drawn = everything(draw(Stratified(), torch.arange(50) % 4, 7, 34, classes=4))
    assert drawn.sort().values.tolist() == list(range(50))


@pytest.mark.parametrize(("labels", "clients"), [(50, 10), (600, 40), (240, 40), (10, 2), (45, 10), (605, 10), (7, 3)])
@pytest.mark.parametrize("per_client", [10, 2])
def test_classes_get_equal_totals_where_the_clients_shares_leave_remainders(
    labels: int, clients: int, per_client: int
) -> None:
    """Clients with the same classes; a class's total is at most one label above another's."""
    quotas = label_quotas(labels, [range(per_client)] * clients)
    assert quotas.sum() == labels
    assert np.ptp(quotas.sum(axis=0)) <= 1
    assert np.ptp(quotas.sum(axis=1)) <= 1
    assert np.ptp(quotas, axis=1).max() <= 1


def test_largest_remainder_by_hand() -> None:
    """10/3 each, and one more; 3.5, 1.4, 2.1, and one more for 3.5; a full part passes the rest to the others."""
    assert largest_remainder(10, np.array([1.0, 1.0, 1.0])).tolist() == [4, 3, 3]
    assert largest_remainder(7, np.array([0.5, 0.2, 0.3])).tolist() == [4, 1, 2]
    assert apportion(10, np.array([1.0, 1.0, 0.0]), np.array([2, 50, 50])).tolist() == [2, 8, 0]
    assert apportion(10, np.array([1.0, 1.0, 0.0]), np.array([2, 3, 50])).tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: LabeledClasses(0), {}, "classes_per_client of LabeledClasses is 0"),
        (lambda: ClassMismatch(alpha=-1), {}, "alpha of ClassMismatch is -1"),
        (lambda: ClassMismatch(1.5), {}, r"ratio of ClassMismatch is 1\.5"),
        (lambda: ClassMismatch(num_unlabeled=99999), {}, "num_unlabeled of ClassMismatch is 99999: give at most 49400"),
        (lambda: LabeledClasses(11), {}, "classes_per_client of this partition is 11: give at most 10"),
        (Stratified, {"count": 60000}, r"data\.num_labels: the clients would have 6000 labelled samples of class 0"),
        (Stratified, {"location": "server"}, r"data\.label_location: Stratified assigns labels to clients"),
    ],
)
def test_what_cannot_be_assigned_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    asked = SplitRequest(CIFAR, 10, 10, options.get("count", 600), options.get("location", "clients"))
    with pytest.raises(ValueError, match=message):
        make().split(asked, sampling.rng(0, "partition"))
