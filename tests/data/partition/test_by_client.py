"""Each partition against its definition: the clients' classes, their images, and the proportions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedssl.data import BalancedDirichlet, ExtendedDirichlet, Partition

LABELS = torch.arange(6000) % 10


def counts_of(rule: Partition, clients: int, labels: Tensor = LABELS, seed: int = 0) -> Tensor:
    """The images of every class at every client, ``(clients, classes)``; each image is assigned once."""
    parts = rule.assign(labels, clients, 10, np.random.default_rng(seed))
    assert torch.cat(parts).sort().values.equal(torch.arange(len(labels)))
    return torch.stack([labels[part].bincount(minlength=10) for part in parts])


def test_extended_dirichlet_gives_each_client_c_classes_and_each_class_equally_many_clients() -> None:
    counts = counts_of(ExtendedDirichlet(3, alpha=0.1, min_per_class=5), 20)
    assert (counts > 0).sum(dim=1).tolist() == [3] * 20
    assert (counts > 0).sum(dim=0).tolist() == [6] * 10
    assert counts[counts > 0].min() >= 5
    assert len({tuple((row > 0).tolist()) for row in counts}) > 5, "the classes are drawn"
    free = counts_of(ExtendedDirichlet(3, alpha=0.01, min_per_class=0), 20)
    assert (free > 0).sum() < 60, "a share may be none"


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_extended_dirichlet_divides_a_class_as_the_distribution_does(alpha: float) -> None:
    """The variance of an entry of Dirichlet(alpha) over n clients is (n - 1) / (n^2 (n alpha + 1))."""
    shares = [counts_of(ExtendedDirichlet(10, alpha, 0), 5, seed=seed) / 600 for seed in range(200)]
    assert float(torch.stack(shares).var()) == pytest.approx(4 / (25 * (5 * alpha + 1)), rel=0.06)


def test_balanced_dirichlet_gives_equal_numbers_in_the_proportions_of_each_client_s_draw() -> None:
    """Two of ten clients draw (0.75, 0.25, 0, ..) and (0.25, 0.75, 0, ..), the others no image of these two classes."""

    class Drawn(np.random.Generator):
        def dirichlet(self, alpha: Any, size: Any = None) -> Any:
            assert set(alpha) == {0.5}
            drawn.append(alpha)
            most = {1: [6, 2], 2: [2, 6]}.get(len(drawn), [0, 0])
            return np.array([*most, *([0] * 8 if sum(most) else [1] * 8)]) / 8

    drawn: list[Any] = []
    parts = BalancedDirichlet(0.5).assign(LABELS[:5999], 10, 10, Drawn(np.random.Philox(0)))
    counts = torch.stack([LABELS[part].bincount(minlength=10) for part in parts])
    assert sorted(counts.sum(dim=1).tolist()) == [599, *[600] * 9]
    assert counts[0, :2].tolist() == pytest.approx([450, 150], abs=40)
    assert counts[1, :2].tolist() == pytest.approx([150, 450], abs=40)
    assert counts[2:, :2].sum() < 5
    alike, apart = (counts_of(BalancedDirichlet(alpha), 10).float().std(dim=0).mean() for alpha in (100, 0.1))
    assert 5 * alike < apart


@pytest.mark.parametrize(
    ("make", "clients", "message"),
    [
        (lambda: ExtendedDirichlet(0), 5, "classes_per_client of ExtendedDirichlet is 0: give 1 or more"),
        (lambda: ExtendedDirichlet(1), 5, "is 1: give at most the 10 classes, and enough that 5 clients have all"),
        (lambda: ExtendedDirichlet(11), 5, "is 11: give at most the 10 classes"),
        (lambda: ExtendedDirichlet(alpha=0), 5, "alpha of ExtendedDirichlet is 0"),
        (lambda: ExtendedDirichlet(min_per_class=-1), 5, "min_per_class of ExtendedDirichlet is -1"),
        (lambda: BalancedDirichlet(float("inf")), 5, "alpha of BalancedDirichlet is inf"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], clients: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counts_of(make(), clients)
