"""The indices of many parties in one tensor: 100,000 clients are three tensors, not 100,000."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ClientIndices(NamedTuple):
    """The images of one client.

    Attributes:
        labeled: Indices of its labelled images, int64 ``(labelled,)``.
        unlabeled: Indices of its unlabelled images, int64 ``(unlabelled,)``.
    """

    labeled: Tensor
    unlabeled: Tensor


class IndexLists:
    """One list of indices for each party, end to end in one tensor.

    ``lists[k]`` is a view of party k's part.

    Args:
        values: All lists, one after another, ``(n,)``.
        sizes: Length of each list, int64 ``(parties,)``, on the CPU.

    Attributes:
        ends: 0, then the end of each list in ``values``.
    """

    def __init__(self, values: Tensor, sizes: Tensor) -> None:
        self.values = values
        self.sizes = sizes
        self.ends = [0, *sizes.cumsum(0).tolist()]

    @classmethod
    def from_tensors(cls, parts: Iterable[Tensor]) -> IndexLists:
        """The lists of a sequence of tensors."""
        parts = list(parts)
        sizes = torch.tensor(list(map(torch.numel, parts)), dtype=torch.int64)
        return cls(torch.cat([torch.zeros(0, dtype=torch.int64), *parts]), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, party: int) -> Tensor:
        party = range(len(self))[party]
        return self.values[self.ends[party] : self.ends[party + 1]]

    def owners(self) -> Tensor:
        """The party of every entry of ``values``, int64 ``(n,)``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def tolist(self) -> list[list[int]]:
        """The lists as Python's."""
        values = self.values.tolist()
        return [values[first:end] for first, end in pairwise(self.ends)]

    def select(self, keep: Tensor) -> IndexLists:
        """The entries for which ``keep`` ``(n,)`` is true."""
        return IndexLists(self.values[keep], self.owners()[keep].bincount(minlength=len(self)))

    def lookup(self, table: Tensor) -> IndexLists:
        """Every entry replaced by its entry in a table, such as labels."""
        return IndexLists(table[self.values], self.sizes)

    def to(self, device: torch.device) -> IndexLists:
        """The same with the values on a device."""
        return IndexLists(self.values.to(device), self.sizes)

    def sorted(self) -> IndexLists:
        """Every list in ascending order."""
        by_value = self.values.argsort(stable=True)
        order = by_value[self.owners()[by_value].argsort(stable=True)]
        return IndexLists(self.values[order], self.sizes)

    def append(self, other: IndexLists) -> IndexLists:
        """Every party's list followed by its list in ``other``."""
        order = torch.cat([self.owners(), other.owners()]).argsort(stable=True)
        return IndexLists(torch.cat([self.values, other.values])[order], self.sizes + other.sizes)


class ClientList(Sequence[ClientIndices]):
    """The images of every client.

    Args:
        labeled: Indices of the clients' labelled images.
        unlabeled: Indices of their unlabelled images.
    """

    def __init__(self, labeled: IndexLists, unlabeled: IndexLists) -> None:
        self.labeled = labeled
        self.unlabeled = unlabeled

    @classmethod
    def from_clients(cls, clients: Sequence[ClientIndices]) -> ClientList:
        """The list of a sequence; a list of this class as it is."""
        if isinstance(clients, cls):
            return clients
        return cls(
            IndexLists.from_tensors(c.labeled for c in clients),
            IndexLists.from_tensors(c.unlabeled for c in clients),
        )

    @classmethod
    def mark(cls, parts: IndexLists, is_labeled: Tensor) -> ClientList:
        """Clients that hold ``parts``; ``is_labeled`` ``(N,)`` marks the labelled samples."""
        marked = is_labeled[parts.values]
        return cls(parts.select(marked), parts.select(~marked))

    def to(self, device: torch.device) -> ClientList:
        """The same on a device."""
        return ClientList(self.labeled.to(device), self.unlabeled.to(device))

    def __len__(self) -> int:
        return len(self.labeled)

    def __getitem__(self, client: Any) -> Any:
        """The images of a client; of a range of clients a list."""
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        return ClientIndices(self.labeled[client], self.unlabeled[client])
