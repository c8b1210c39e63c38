"""Dirichlet proportions within pairs of clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.paired import PairedDirichlet
from lightning_fedssl.data.partition.statistics import PartitionStatistics
from tests.data.partition.helpers import CIFAR_LABELS, draw


def of_parts(parts: list[torch.Tensor]) -> PartitionStatistics:
    counts = torch.stack([F.one_hot(CIFAR_LABELS[part], 10).sum(0) for part in parts])
    return PartitionStatistics(counts, torch.zeros_like(counts), torch.zeros(10, dtype=torch.int64), 0, "")


@pytest.mark.parametrize(("alpha", "skew", "classes"), [(0.1, 0.51, 5.9), (1.0, 0.37, 7.9)])
def test_on_cifar_the_skew_is_that_of_the_authors_code(alpha: float, skew: float, classes: float) -> None:
    """The values are means of six draws of their sample_dirichlet.py, of labelled or of unlabelled images."""
    splits = [draw(PairedDirichlet(alpha), CIFAR_LABELS, 20, 5000, "clients", seed=seed) for seed in range(4)]
    unlabeled = [of_parts([client.unlabeled for client in split.clients]) for split in splits]
    labeled = [of_parts([client.labeled for client in split.clients]) for split in splits]

    assert np.mean([one.class_skew for one in labeled + unlabeled]) == pytest.approx(skew, abs=0.03)
    assert np.mean([one.effective_classes for one in labeled + unlabeled]) == pytest.approx(classes, abs=0.4)
    assert all((one.sizes == 250).all() for one in labeled)
    assert all((one.sizes == 2250).all() for one in unlabeled)
    apart = labeled[0].class_counts / 250 - unlabeled[0].class_counts / 2250
    assert apart.abs().sum(1).mean() > 0.3  # a client's labels are of other classes than its images


def test_the_clients_of_a_pair_share_its_classes_and_a_last_one_is_alone() -> None:
    labels = torch.arange(500) % 5
    parts = PairedDirichlet(1e-3).assign(labels, 5, 5, sampling.rng(0, "test"))
    counts = torch.stack([F.one_hot(labels[part], 5).sum(0) for part in parts])

    assert [len(part) for part in parts] == [100] * 5
    assert len(torch.cat(parts).unique()) == 500
    assert (counts[4] > 0).all()  # alone: a random tenth of all
    for first in (0, 2):  # at most one class lies on both sides of the equal cut, or was divided by the draw
        assert ((counts[first] > 0) & (counts[first + 1] > 0)).sum() <= 2


def test_a_part_that_cannot_be_even_is_the_most_even_draw() -> None:
    labels = torch.tensor([0] * 9 + [1])
    parts = PairedDirichlet(1e-3).assign(labels, 2, 2, sampling.rng(0, "test"))

    assert [len(part) for part in parts] == [5, 5]


def test_labels_at_the_server_leave_the_rest_to_the_clients() -> None:
    split = draw(PairedDirichlet(), CIFAR_LABELS, 20, 100)

    assert len(split.server_labeled) == 100
    assert {len(client.unlabeled) for client in split.clients} == {2495}
