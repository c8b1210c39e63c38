"""Dirichlet class proportions within pairs of clients, as SAGE and ProxyFL draw them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl.data.partition.base import (
    Partition,
    above_0,
    choose_labeled,
    dirichlet,
)
from lightning_fedssl.data.partition.class_balance import positions_by_class
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.index_lists import ClientList

LEAST_SHARE = 0.5
"""A pair is drawn again until each of its clients has this share of the mean."""

DRAWS = 1000
"""After so many draws the most even one counts; a pair with few images may have no other."""


class PairedDirichlet(Partition):
    """Clients of equal size; each pair shares a random part of the images by Dirichlet(alpha).

    The images are shuffled and cut into one part for each pair of clients (an odd last client has
    its part alone). Within a part, every class is divided between the two clients by a
    Dirichlet(alpha) draw, in which a client that has its fair share gets nothing more. The two are
    then cut to equal size. Labelled and unlabelled images are drawn apart, so the classes that a
    client has labels of are not those of its images. For the same alpha this is much less skewed
    than :class:`Dirichlet`: CIFAR-10, 20 clients, alpha 0.1: about 6 effective classes a client
    instead of about 2.

    Source: the authors' code of SAGE (CVPR 2025) and ProxyFL (CVPR 2026), "Dir(alpha)".

    Args:
        alpha: Concentration; the smaller, the fewer classes a client has. Published: 0.1, 0.5, 1.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = above_0("PairedDirichlet", "alpha", alpha)

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Assigns labelled and unlabelled images apart where the labels are at the clients.

        See :meth:`Partition.split`.
        """
        if request.label_location == "server":
            return super().split(request, generator)
        available = torch.nonzero(request.labels >= 0).flatten()
        labeled = choose_labeled(request, available, generator)
        unlabeled = available[~torch.isin(available, labeled)]
        clients = ClientList(
            self._assign_pool(request, labeled, generator),
            self._assign_pool(request, unlabeled, generator),
        )
        return FederatedSplit(request.seed, labeled[:0], clients)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Divides a random part between the clients of each pair; see :meth:`Partition.assign`."""
        order = torch.from_numpy(generator.permutation(len(labels)))
        shares = order.tensor_split(num_clients)
        parts: list[Tensor] = []
        for first in range(0, num_clients, 2):
            pair = shares[first : first + 2]
            members = torch.cat(pair)
            divided = self._divide(labels[members], len(pair), num_classes, generator)
            parts += members[divided].tensor_split(len(pair))
        return parts

    def _divide(
        self, labels: Tensor, clients: int, num_classes: int, generator: Generator
    ) -> Tensor:
        """The positions of a pair's images: the first client's, class by class, then the second's.

        Args:
            labels: Of the pair's images, int64 ``(n,)``.
            clients: 2, or 1 for an odd last client.
            num_classes: Number of classes, K.
            generator: The random stream to draw from.
        """
        by_class = positions_by_class(labels, num_classes)
        best: list[NDArray[np.int64]] = []
        for _ in range(DRAWS):
            candidate = self._draw(by_class, clients, len(labels), generator)
            if not best or min(map(len, candidate)) > min(map(len, best)):
                best = candidate
            if min(map(len, best)) >= int(LEAST_SHARE * len(labels) / clients):
                break
        return torch.from_numpy(np.concatenate(best))

    def _draw(
        self,
        by_class: list[NDArray[np.int64]],
        clients: int,
        total: int,
        generator: Generator,
    ) -> list[NDArray[np.int64]]:
        """One draw of the proportions of every class."""
        parts: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * clients
        for members in by_class:
            sizes = np.array(list(map(len, parts)))
            open_to = sizes < total / clients
            shares = dirichlet(self.alpha, clients, generator)
            if (shares * open_to).sum() > 0:
                shares = shares * open_to
            cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
            for client, piece in enumerate(np.split(members, cuts)):
                parts[client] = np.concatenate([parts[client], piece])
        return parts
