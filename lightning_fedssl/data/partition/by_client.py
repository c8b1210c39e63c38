"""Dirichlet partitions that fix what a client has: the number of its classes, or of its images."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from torch import Tensor

from lightning_fedssl.data.partition.base import (
    Partition,
    above_0,
    at_least,
    dirichlet,
    dirichlet_rows,
    held_by,
    require,
)
from lightning_fedssl.data.partition.class_balance import largest_remainder, positions_by_class


class ExtendedDirichlet(Partition):
    """Every client has ``classes_per_client`` classes, in Dirichlet proportions of their images.

    Each client in turn gets the classes that fewest clients have, drawn among equals. Each class is
    then divided between the clients that have it by a Dirichlet(alpha) draw.

    Source: the "extended Dirichlet strategy" of Y. Li, X. Lyu, "Convergence Analysis of Sequential
    Federated Learning on Heterogeneous Data", NeurIPS 2023, arXiv 2311.03154. Its ``min_per_class``
    is 0 here; more are assigned before the draw, and the draw divides the rest.

    Args:
        classes_per_client: C.
        alpha: Concentration; the smaller, the more uneven.
        min_per_class: Least number of images of each of a client's classes, as far as they reach:
            a client then has at least C times as many.
    """

    def __init__(
        self, classes_per_client: int = 2, alpha: float = 1.0, min_per_class: int = 1
    ) -> None:
        name = "ExtendedDirichlet"
        self.classes_per_client = at_least(1, name, "classes_per_client", classes_per_client)
        self.alpha = above_0(name, "alpha", alpha)
        self.min_per_class = at_least(0, name, "min_per_class", min_per_class)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Gives the clients their classes, then divides each; see :meth:`Partition.assign`."""
        by_class = [members for members in positions_by_class(labels, num_classes) if len(members)]
        require(
            "ExtendedDirichlet",
            "classes_per_client",
            self.classes_per_client,
            len(by_class) / num_clients <= self.classes_per_client <= len(by_class),
            f"at most the {len(by_class)} classes, and enough that {num_clients} clients have all",
        )
        has = np.zeros((num_clients, len(by_class)), dtype=bool)
        for own in has:
            drawn = generator.permutation(len(by_class))
            fewest = np.argsort(has.sum(axis=0)[drawn], kind="stable")
            own[drawn[fewest[: self.classes_per_client]]] = True
        owner = np.empty(len(labels), dtype=np.int64)
        for members, clients in zip(by_class, map(np.flatnonzero, has.T), strict=True):
            least = min(self.min_per_class, len(members) // len(clients))
            shares = dirichlet(self.alpha, len(clients), generator)
            counts = least + largest_remainder(len(members) - least * len(clients), shares)
            owner[generator.permutation(members)] = np.repeat(clients, counts)
        return held_by(owner, num_clients)


class BalancedDirichlet(Partition):
    """Clients of equal size; each has the class proportions of its own Dirichlet draw.

    For every client ``q ~ Dir(alpha)`` is drawn over the classes. The clients draw their images one
    at a time, in random order: a class by q, among those that are not used up, and an image of it.
    Every image is assigned; the sizes differ by one at most.

    Source: the authors' code of FedDyn (D. A. E. Acar et al., "Federated Learning Based on Dynamic
    Regularization", ICLR 2021, arXiv 2111.04263).

    Args:
        alpha: Concentration: near 0 few classes for each client, large the same classes for all.
    """

    def __init__(self, alpha: float = 0.3) -> None:
        self.alpha = above_0("BalancedDirichlet", "alpha", alpha)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Draws the clients' proportions, then their images; see :meth:`Partition.assign`."""
        left = [[*generator.permutation(m)] for m in positions_by_class(labels, num_classes)]
        q = dirichlet_rows(self.alpha, num_clients, num_classes, generator)
        owner = np.empty(len(labels), dtype=np.int64)
        for client in generator.permutation(np.arange(len(labels)) % num_clients):
            possible = (q[client] + 1e-9) * list(map(bool, left))  # all of q may be used up
            label = generator.choice(num_classes, p=possible / possible.sum())
            owner[left[label].pop()] = client
        return held_by(owner, num_clients)
