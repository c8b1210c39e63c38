"""One client that holds what a federation's server and clients hold: for methods without a
federation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from numpy.random import Generator

from lightning_fedssl.data.partition.base import Iid, Partition, at_least
from lightning_fedssl.data.partition.federated_split import (
    ClientIndices,
    FederatedSplit,
    SplitRequest,
)


class Pooled(Partition):
    """The images of another partition, its labels at the server, at one client: the same labelled
    and the same others.

    The other partition is drawn as a run with ``data.label_location: server`` and as many clients
    draws it from the same seed, so that a method on pooled images is compared with the federated
    ones on equal labels, seed by seed. Needs ``data.num_clients: 1`` and ``data.label_location:
    clients``.

    Args:
        num_clients: Clients of the other partition.
        of: The other partition; ``Iid`` if left out.
    """

    def __init__(self, num_clients: int, of: Partition | None = None) -> None:
        self.num_clients = at_least(1, "Pooled", "num_clients", num_clients)
        self.of = Iid() if of is None else of

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Draws the other partition and pools it; see :meth:`Partition.split`.

        Raises:
            ValueError: If there is more than one client, or the labels are not at it; the message
                names the key.
        """
        if request.num_clients != 1 or request.label_location != "clients":
            raise ValueError(
                "data.partition: Pooled needs data.num_clients: 1 and data.label_location: clients"
            )
        federation = replace(request, num_clients=self.num_clients, label_location="server")
        assigned = self.of.split(federation, generator)
        self.of.check(assigned, federation)
        unlabeled = torch.cat([client.unlabeled for client in assigned.clients]).sort().values
        none = assigned.server_labeled[:0]
        return FederatedSplit(
            request.seed, none, [ClientIndices(assigned.server_labeled, unlabeled)]
        )
