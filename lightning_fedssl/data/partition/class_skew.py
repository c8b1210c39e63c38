"""A partition with a given class skew R: every two users with different main classes are exactly R
apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl.data.partition.base import Partition, at_least, held_by, require
from lightning_fedssl.data.partition.class_balance import choose_balanced
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest


class ClassSkew(Partition):
    """Every user has one main class.

    Half the L1 distance of the class histograms of two users is R.

    With n_j images of class j in the pool of N, ``q_j = n_j / N`` and m_j users of main class j, a
    user of main class j gets ``n_j R / m_j`` images of class j, and ``n_i q_j (1 - R) / m_j`` of
    every class i, j included. User k has the main class ``k mod d``. With fewer users than classes,
    user k has the main classes j with ``floor(j K / d) = k``. R = 0: all users alike; R = 1: one
    main class each.

    Counts are rounded by largest remainder, class by class, so that every image is assigned once.
    If K is not a multiple of d, users whose main class more users share hold fewer images. Users of
    one main class are 0 apart, so the measured R over all pairs is smaller than the nominal one for
    K > d, by the factor ``1 - sum_j m_j (m_j - 1) / (K (K - 1))``.

    Source: FedRGD (IEEE BigData 2021, arXiv 2008.11364), Definition 2 and appendix A.2; main
    classes and rounding are ours, and so is the rule for fewer users than classes.

    Args:
        r: R, the nominal skew, from 0 to 1.
        server_images: With labels at the clients, so many labelled images, balanced over the
            classes, go to the server besides (FedRGD's supervised users); 0 for none.
    """

    def __init__(self, r: float = 0.0, server_images: int = 0) -> None:
        self.r = require("ClassSkew", "r", r, 0 <= r <= 1, "a number from 0 (all alike) to 1")
        self.server_images = at_least(0, "ClassSkew", "server_images", server_images)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Assigns every class by its users' counts; see :meth:`Partition.assign`."""
        values = labels.numpy()
        classes, sizes = np.unique(values, return_counts=True)
        owner = np.empty(len(labels), dtype=np.int64)
        for label, target in zip(classes, targets(sizes, num_clients, self.r).T, strict=True):
            members = generator.permutation(np.flatnonzero(values == label))
            counts = largest_remainder(target, len(members), generator)
            owner[members] = np.repeat(np.arange(num_clients), counts)
        return held_by(owner, num_clients)

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Assigns as :meth:`Partition.split`, after the server's own images if ``server_images``
        are asked for.
        """
        if not self.server_images:
            return super().split(request, generator)
        if request.label_location == "server":
            raise ValueError(
                "data.partition: server_images of ClassSkew is for labels at the clients; with "
                "data.label_location server, data.num_labels is what the server holds"
            )
        available = torch.nonzero(request.labels >= 0).flatten()
        if self.server_images > len(available):
            raise ValueError(
                f"data.partition: server_images is {self.server_images}, but there are only "
                f"{len(available)} training samples; ask for fewer"
            )
        labels = request.labels[available]
        chosen = choose_balanced(labels, self.server_images, request.num_classes, generator)
        server = available[chosen]
        rest = request.labels.clone()
        rest[server] = -1
        split = super().split(replace(request, labels=rest), generator)
        return replace(split, server_labeled=server)


def targets(sizes: NDArray[Any], num_clients: int, r: float) -> NDArray[Any]:
    """How many images of every class every user should get, before rounding.

    Args:
        sizes: n_j, images of every class, ``(d,)``.
        num_clients: K.
        r: R.

    Returns:
        ``(K, d)``; column j has the sum n_j.
    """
    owned = ownership(num_clients, len(sizes))
    share = owned @ (sizes / sizes.sum())
    targets: NDArray[Any] = ((1 - r) * share[:, None] + r * owned) * sizes
    return targets


def ownership(num_clients: int, num_classes: int) -> NDArray[Any]:
    """The part of every class that is every user's own, ``(K, d)``; columns sum to 1."""
    owned = np.zeros((num_clients, num_classes))
    clients = np.arange(num_clients)
    classes = np.arange(num_classes)
    if num_clients < num_classes:
        owned[classes * num_clients // num_classes, classes] = 1
    else:
        owned[clients, clients % num_classes] = 1
    owned /= owned.sum(axis=0)
    return owned


def largest_remainder(target: NDArray[Any], total: int, generator: Generator) -> NDArray[Any]:
    """Whole numbers close to ``target`` with the sum ``total``.

    Among equal remainders the choice is random.

    Args:
        target: ``(K,)``, not negative, with the sum ``total``.
        total: The sum.
        generator: Draws among equal remainders.
    """
    target = target.round(9)  # so that 48.000000000000007 is 48, and equal remainders are equal
    counts: NDArray[Any] = np.floor(target).astype(np.int64)
    order = generator.permutation(len(target))
    by_remainder = order[np.argsort((counts - target)[order], kind="stable")]
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return counts
