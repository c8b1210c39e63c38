"""FedMatch's class-imbalanced clients: as many types as classes, each with a class of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl.data.partition.base import Partition
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

    A class's probability is 0.5 for t, 0.15 for t - 1 and t + 1, 0.02 for t + K / 2 and 0.03 for
    each other class.

    Source: FedMatch (ICLR 2021, arXiv 2006.12097) and its authors' code, which has K = 10; with
    other numbers of classes the probabilities are renormalised, which is ours.
    """

    def probabilities(self, num_classes: int) -> NDArray[Any]:
        """Of every type the classes' probabilities, ``(K, K)``: row t is row 0 shifted by t."""
        row = np.full(num_classes, 0.03)
        row[num_classes // 2] = 0.02
        row[[1 % num_classes, -1]] = 0.15
        row[0] = 0.5
        row /= row.sum()
        classes = np.arange(num_classes)
        return np.asarray(row[classes - classes[:, None]])  # a negative place is one from the end

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Draws class counts client by client; see :meth:`Partition.assign`."""
        members = list(map(generator.permutation, positions_by_class(labels, num_classes)))
        types = self.probabilities(num_classes)
        size = len(labels) // num_clients
        parts = []
        for client in range(num_clients):
            pieces = []
            for label, count in enumerate(generator.multinomial(size, types[client % num_classes])):
                piece, members[label] = np.split(members[label], [count])
                pieces.append(piece)
            parts.append(torch.from_numpy(np.concatenate(pieces)))
        return parts

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """As :meth:`Partition.split`, but labelled images at the clients are balanced at every one
        of them.

        Raises:
            ValueError: There are fewer images than labels; the message names the key.
        """
        classes = request.num_classes
        if request.label_location == "server" or request.num_labels == "all":
            return super().split(request, generator)
        every_class = [range(classes)] * request.num_clients
        quotas = label_quotas(request.num_labels, every_class)
        members = list(map(generator.permutation, positions_by_class(request.labels, classes)))
        labeled, left = take(members, quotas)
        pool = torch.from_numpy(np.sort(np.concatenate(left)))
        parts = self._assign_pool(request, pool, generator)
        return FederatedSplit(request.seed, pool[:0], ClientList(labeled.sorted(), parts))
