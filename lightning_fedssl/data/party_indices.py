"""Every party's indices and labels on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedssl.data.partition.federated_split import FederatedSplit
from lightning_fedssl.data.partition.index_lists import IndexLists


@dataclass(frozen=True)
class PartyIndices:
    """What each party holds; the clients in their order, then the server, whose number is -1.

    Attributes:
        labeled: Indices of the labelled images.
        labels: Their labels.
        unlabeled: Indices of the unlabelled images.
        pool: Indices of all clients' images, ascending, ``(n,)``.
        outside_server: Indices of all images of the federation but the server's, ascending, ``(n,)``.
    """

    labeled: IndexLists
    labels: IndexLists
    unlabeled: IndexLists
    pool: Tensor
    outside_server: Tensor

    @classmethod
    def of(cls, split: FederatedSplit, labels: Tensor, used: Tensor) -> PartyIndices:
        """The parties of a split.

        Args:
            split: The partition.
            labels: Labels of all training images, ``(N,)``.
            used: Which images belong to the federation, bool ``(N,)``.
        """
        clients = split.client_list
        server = torch.tensor([len(split.server_labeled)])
        labeled = IndexLists(
            torch.cat([clients.labeled.values, split.server_labeled]), torch.cat([clients.labeled.sizes, server])
        )
        unlabeled = IndexLists(clients.unlabeled.values, torch.cat([clients.unlabeled.sizes, 0 * server]))
        outside = used.clone()
        outside[split.server_labeled] = False
        pool = torch.cat([clients.labeled.values, clients.unlabeled.values]).sort().values
        return cls(labeled, labeled.lookup(labels), unlabeled, pool, outside.nonzero().flatten())

    def to(self, device: torch.device) -> PartyIndices:
        """The same on a device."""
        return PartyIndices(
            self.labeled.to(device), self.labels.to(device), self.unlabeled.to(device), self.pool.to(device),
            self.outside_server.to(device),
        )  # fmt: skip
