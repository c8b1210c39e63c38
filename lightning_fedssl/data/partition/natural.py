"""Partitions for natural clients, and for federations in which only some clients have labels."""

from __future__ import annotations

import numpy as np
import torch

from lightning_fedssl.data.partition.base import Iid, Partition, choose_labeled
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest


class NaturalClients(Partition):
    """Every client holds the samples with its own identifier; client k is the k-th identifier in sorted order.

    Needs data with client identifiers and ``data.num_clients`` equal to their number.
    """

    def split(self, asked: SplitRequest, generator: np.random.Generator) -> FederatedSplit:
        """Assigns by identifier; see :meth:`Partition.split`.

        Raises:
            ValueError: If there are no identifiers, or another number of them; the message names the key.
        """
        if asked.client_ids is None:
            raise ValueError("data.partition: NaturalClients needs data with client identifiers (client_ids)")
        count = int(asked.client_ids.max()) + 1
        if count != asked.num_clients:
            raise ValueError(f"data.num_clients: {asked.num_clients}, but the data have {count} clients; set {count}")
        available = torch.nonzero(asked.labels >= 0).flatten()
        labeled = choose_labeled(asked, available, generator)
        is_labeled = torch.zeros(len(asked.labels), dtype=torch.bool)
        is_labeled[labeled] = True
        if asked.label_location == "server":
            available = available[~is_labeled[available]]
        owners = asked.client_ids[available]
        order = available[owners.argsort(stable=True)]
        parts = order.split(owners.bincount(minlength=count).tolist())
        if asked.label_location == "server":
            return FederatedSplit(asked.seed, labeled, [ClientIndices(labeled[:0], part) for part in parts])
        clients = [ClientIndices(part[is_labeled[part]], part[~is_labeled[part]]) for part in parts]
        return FederatedSplit(asked.seed, labeled[:0], clients)


class FullyLabeledClients(Partition):
    """The first clients have a label for every sample, the others for none: the setting of RSCFed and CBAFed.

    Needs ``data.label_location: clients`` and ``data.num_labels: all``.

    Args:
        labeled_clients: Clients with labels; clients 0 to ``labeled_clients - 1``.
        of: The partition that assigns the samples; ``Iid`` if left out.
    """

    def __init__(self, labeled_clients: int = 1, of: Partition | None = None) -> None:
        if labeled_clients < 1:
            raise ValueError(f"data.partition: labeled_clients is {labeled_clients}: give 1 or more")
        self.labeled_clients = labeled_clients
        self.of = Iid() if of is None else of

    def split(self, asked: SplitRequest, generator: np.random.Generator) -> FederatedSplit:
        """Assigns with the other partition, then hides the labels of all but the first clients.

        Raises:
            ValueError: If labels are not at the clients, or not all, or no client is left without; names the key.
        """
        if asked.label_location != "clients" or asked.num_labels != "all":
            raise ValueError(
                "data.partition: FullyLabeledClients needs data.label_location: clients and data.num_labels: all"
            )
        if self.labeled_clients >= asked.num_clients:
            raise ValueError(f"data.partition: labeled_clients must be below data.num_clients, {asked.num_clients}")
        split = self.of.split(asked, generator)
        clients = [
            client if number < self.labeled_clients else ClientIndices(client.labeled[:0], client.labeled)
            for number, client in enumerate(split.clients)
        ]
        return FederatedSplit(split.seed, split.server_labeled, clients)
