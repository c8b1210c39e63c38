"""FedMatch's class-imbalanced clients: as many types as classes, each with a class of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl.data.partition.base import Partition, require
from lightning_fedssl.data.partition.class_balance import positions_by_class
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.index_lists import ClientList
from lightning_fedssl.data.partition.labels_at_clients import label_quotas, take


class ClientTypes(Partition):
    """Client c is of type ``t = c mod K``: half of its unlabelled images are of class t, the others
    mostly of t +- 1.

    Every client draws the same number of images, each of a class drawn by its type's probabilities,
    and takes the next images of that class; a class that has run out gives none, so sizes differ a
    little. Labelled images are balanced: at the clients every one has as many of each class as any
    other. For clients of one kind (IID): ``Stratified``, or with labels at the server ``Iid``.

    Source: FedMatch (ICLR 2021, arXiv 2006.12097) and its authors' code, which has K = 10; with
    other numbers of classes the probabilities are renormalised, which is ours.

    Args:
        own: Probability of class t.
        neighbours: Of class t - 1, and of class t + 1.
        opposite: Of class t + K / 2.
        others: Of each other class.
    """

    def __init__(
        self,
        own: float = 0.5,
        neighbours: float = 0.15,
        opposite: float = 0.02,
        others: float = 0.03,
    ) -> None:
        values = {"own": own, "neighbours": neighbours, "opposite": opposite, "others": others}
        for name, value in values.items():
            fits = 0 <= value < math.inf and sum(values.values()) > 0
            require("ClientTypes", name, value, fits, "a finite number of 0 or more, not all 0")
        self.own = own
        self.neighbours = neighbours
        self.opposite = opposite
        self.others = others

    def probabilities(self, num_classes: int) -> NDArray[Any]:
        """Of every type the classes' probabilities, ``(K, K)``: row t is row 0 shifted by t."""
        row = np.full(num_classes, self.others, dtype=np.float64)
        row[num_classes // 2] = self.opposite
        row[[1 % num_classes, -1]] = self.neighbours
        row[0] = self.own
        row /= row.sum()
        return np.stack([np.roll(row, shift) for shift in range(num_classes)])

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Draws class counts client by client; see :meth:`Partition.assign`."""
        members = list(map(generator.permutation, positions_by_class(labels, num_classes)))
        probabilities = self.probabilities(num_classes)
        taken = np.zeros(num_classes, dtype=np.int64)
        parts = []
        for client in range(num_clients):
            counts = generator.multinomial(
                len(labels) // num_clients, probabilities[client % num_classes]
            )
            pieces = [
                own[first : first + n] for own, first, n in zip(members, taken, counts, strict=True)
            ]
            taken += counts
            parts.append(torch.from_numpy(np.concatenate(pieces)))
        return parts

    def split(self, asked: SplitRequest, generator: Generator) -> FederatedSplit:
        """As :meth:`Partition.split`, but labelled images at the clients are balanced at every one
        of them.

        Raises:
            ValueError: There are fewer images than labels; the message names the key.
        """
        clients = asked.num_clients
        classes = asked.num_classes
        num_labels = asked.num_labels
        if asked.label_location == "server" or num_labels == "all":
            return super().split(asked, generator)
        quotas = label_quotas(num_labels, clients, [range(classes)] * clients)
        members = list(map(generator.permutation, positions_by_class(asked.labels, classes)))
        labeled, left = take(members, quotas)
        pool = torch.from_numpy(np.sort(np.concatenate(left)))
        parts = self._assign_pool(asked, pool, generator)
        return FederatedSplit(asked.seed, pool[:0], ClientList(labeled.sorted(), parts))
