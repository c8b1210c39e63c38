"""Partitions for natural clients, and for federations in which only some clients have labels."""

from __future__ import annotations

from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.data.partition.base import (
    Iid,
    Partition,
    append_unlabeled,
    at_least,
    in_equal_parts,
    marked,
)
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.index_lists import ClientList, IndexLists


class NaturalClients(Partition):
    """Every client holds the samples with its own identifier.

    Client k is the k-th identifier in sorted order.

    Needs data with client identifiers and ``data.num_clients`` equal to their number.
    """

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Assigns by identifier; see :meth:`Partition.split`.

        Raises:
            ValueError: If there are no identifiers, or another number of them; the message names
                the key.
        """
        if request.client_ids is None:
            raise ValueError(
                "data.partition: NaturalClients needs data that name the client of each sample: "
                "client_ids in Python and in Arrays, client_column of Table and ImageTable, or "
                "SiteFolders"
            )
        if (count := int(request.client_ids.max()) + 1) != request.num_clients:
            raise ValueError(
                f"data.num_clients: {request.num_clients}, but data.dataset names {count}; set "
                f"{count}"
            )
        return super().split(request, generator)

    def _assign_pool(self, request: SplitRequest, pool: Tensor, generator: Generator) -> IndexLists:
        assert request.client_ids is not None  # split has refused this
        return _by_owner(pool, request.client_ids, request.num_clients)

    def add_unlabeled(
        self, split: FederatedSplit, request: SplitRequest, generator: Generator
    ) -> FederatedSplit:
        """Gives the images without labels to the clients of their identifiers."""
        assert request.client_ids is not None  # split has refused this
        return append_unlabeled(
            split, _by_owner(request.without_label, request.client_ids, request.num_clients)
        )


class FullyLabeledClients(Partition):
    """The first clients have a label for every sample, the others for none: the setting of RSCFed
    and CBAFed.

    Needs ``data.label_location: clients`` and ``data.num_labels: all``.

    Args:
        labeled_clients: Clients with labels; clients 0 to ``labeled_clients - 1``.
        of: The partition that assigns the samples; ``Iid`` if left out.
    """

    def __init__(self, labeled_clients: int = 1, of: Partition | None = None) -> None:
        self.labeled_clients = at_least(
            1, "FullyLabeledClients", "labeled_clients", labeled_clients
        )
        self.of = Iid() if of is None else of

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Assigns with the other partition, then hides the labels of all but the first clients.

        Raises:
            ValueError: If labels are not at the clients, or not all, or no client is left without;
                names the key.
        """
        if request.label_location != "clients" or request.num_labels != "all":
            raise ValueError(
                "data.partition: FullyLabeledClients needs data.label_location: clients and "
                "data.num_labels: all"
            )
        if self.labeled_clients >= request.num_clients:
            raise ValueError(
                "data.partition: labeled_clients must be below data.num_clients, "
                f"{request.num_clients}"
            )
        split = self.of.split(request, generator)
        self.of.check(split, request)
        # Labels do not matter here: the other partition may be the file of a run with other
        # labeled_clients.
        samples = split.client_list.labeled.append(split.client_list.unlabeled)
        samples = samples.select(request.labels[samples.values] >= 0)
        is_labeled = marked(
            len(request.labels), samples.values[samples.owners() < self.labeled_clients]
        )
        return FederatedSplit(
            split.seed, split.server_labeled, ClientList.mark(samples, is_labeled)
        )

    def add_unlabeled(
        self, split: FederatedSplit, request: SplitRequest, generator: Generator
    ) -> FederatedSplit:
        """Gives the images without labels to the clients without labels, in equal parts of a random
        order.
        """
        others = request.num_clients - self.labeled_clients
        parts = in_equal_parts(request.without_label, others, generator)
        sizes = F.pad(parts.sizes, (self.labeled_clients, 0))  # none to the first clients
        return append_unlabeled(split, IndexLists(parts.values, sizes))


def _by_owner(indices: Tensor, owners: Tensor, num_clients: int) -> IndexLists:
    """The indices of each client, ascending."""
    owner = owners[indices]
    if len(owner) and int(owner.min()) < 0:
        raise ValueError(
            f"data.num_labels: {int((owner < 0).sum())} labelled samples have no client, so all "
            "must be the server's: set all with data.label_location: server, or give client_ids"
        )
    return IndexLists(indices[owner.argsort(stable=True)], owner.bincount(minlength=num_clients))
