"""Statistics of a partition: counts, class skew, and a summary as text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fedssl.data.datasets import plural
from lightning_fedssl.data.partition.federated_split import FederatedSplit
from lightning_fedssl.data.partition.index_lists import IndexLists


@dataclass(frozen=True, eq=False)
class PartitionStatistics:
    """What a partition is like; true labels are counted, so it is for reports only.

    Attributes:
        class_counts: Images per client and class, labelled or not, int64 ``(M, K)``.
        labeled_class_counts: Labelled images per client and class, int64 ``(M, K)``.
        server_class_counts: The server's labelled images per class, int64 ``(K,)``.
        seed: The seed that the partition was drawn with.
        hash: The partition's hash.
        unknown_counts: Images per client whose class is not known to anyone, int64 ``(M,)``; None:
            there are none.
        noun: What a sample is called, ``image`` or ``sample``.
        class_names: The classes in the order of their labels; numbers if left out.
        client_names: The clients where the data name them; else none, and the clients are numbered.
    """

    class_counts: Tensor
    labeled_class_counts: Tensor
    server_class_counts: Tensor
    seed: int
    hash: str
    unknown_counts: Tensor | None = None
    noun: str = "image"
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()

    @property
    def sizes(self) -> Tensor:
        """Images per client, int64 ``(M,)``."""
        counts = self.class_counts.sum(dim=1)
        return counts if self.unknown_counts is None else counts + self.unknown_counts

    @property
    def labeled(self) -> Tensor:
        """Labelled images per client, int64 ``(M,)``."""
        return self.labeled_class_counts.sum(dim=1)

    @property
    def classes_per_client(self) -> Tensor:
        """Number of classes that every client holds, int64 ``(M,)``."""
        return (self.class_counts > 0).sum(dim=1)

    @cached_property
    def histograms(self) -> Tensor:
        """Class shares of every client that holds an image of known class, float64 ``(clients,
        K)``.
        """
        counts = self.class_counts[self.class_counts.sum(dim=1) > 0].double()
        return counts / counts.sum(dim=1, keepdim=True)

    @cached_property
    def class_skew(self) -> float:
        """R: the mean over pairs of clients of half the L1 distance of their class histograms,
        0..1.

        0: all clients alike; 1: no two clients share a class. FedRGD (IEEE BigData 2021),
        Definition 2. The sum over pairs is taken from the sorted shares of each class, in O(K M log
        M).
        """
        clients = len(self.histograms)
        if clients < 2:
            return 0.0
        rank_weights = 2 * torch.arange(clients, dtype=torch.float64) - (clients - 1)
        distances = (self.histograms.sort(dim=0).values * rank_weights[:, None]).sum()
        return float(distances / (clients * (clients - 1)))

    @cached_property
    def effective_classes(self) -> float:
        """The mean over clients of exp(entropy of its class histogram): 1 for one class, K for all
        alike.
        """
        if len(self.histograms) == 0:
            return 0.0
        return float(torch.special.entr(self.histograms).sum(dim=1).exp().mean())

    def summary(self) -> str:
        """The partition in a few plain lines."""
        noun = self.noun
        clients = plural(len(self.sizes), "client")
        samples = plural(int(self.sizes.sum()), noun)
        lines = [f"{clients}: {samples}, {_span(self.sizes)} each"]
        if server := int(self.server_class_counts.sum()):
            each = _span(self.server_class_counts)
            lines.append(f"server: {plural(server, f'labelled {noun}')}, {each} of each class")
        if labeled := int(self.labeled.sum()):
            each = _span(self.labeled)
            lines.append(f"clients: {plural(labeled, f'labelled {noun}')}, {each} at each client")
        if self.class_counts.shape[1]:  # loaders for a module of the user's own have no classes
            suffix = ""
            if self.unknown_counts is not None:
                suffix = " of known class"
                unknown = plural(int(self.unknown_counts.sum()), noun)
                lines.append(f"of unknown class: {unknown} at the clients")
            lines += self._described_classes(suffix)
        lines.append(f"drawn with seed {self.seed}, hash {self.hash[:12]}")
        return "\n".join(lines)

    def _described_classes(self, suffix: str) -> list[str]:
        if not len(self.histograms):
            return [
                f"the classes of the clients' {self.noun}s are not known, so neither is their skew"
            ]
        return [
            f"classes per client: {_span(self.classes_per_client)}, effectively "
            f"{self.effective_classes:.2f} (mean)",
            f"class skew R = {self.class_skew:.3f} (0: all clients alike, 1: no class in "
            f"common){suffix}",
        ]


def statistics(
    split: FederatedSplit,
    labels: Tensor,
    num_classes: int,
    noun: str = "image",
    *names: tuple[str, ...],
) -> PartitionStatistics:
    """Compute the statistics of a split.

    Args:
        split: The split.
        labels: True labels of all training images, int64 ``(N,)``.
        num_classes: Number of classes, K.
        noun: What a sample is called, ``image`` or ``sample``.
        names: Of the classes, then of the clients; see :class:`PartitionStatistics`.
    """
    labeled = _count(split.client_list.labeled, labels, num_classes)
    counts = labeled + _count(split.client_list.unlabeled, labels, num_classes)
    unknown = counts[:, num_classes]
    return PartitionStatistics(
        counts[:, :num_classes],
        labeled[:, :num_classes],
        labels[split.server_labeled].bincount(minlength=num_classes),
        split.seed,
        split.hash,
        unknown if unknown.any() else None,
        noun,
        *names,
    )


def _count(parts: IndexLists, labels: Tensor, num_classes: int) -> Tensor:
    """How many images of each class, and of unknown class, every part holds, int64 ``(parts, K +
    1)``.
    """
    classes = labels[parts.values]
    columns = num_classes + 1
    cell = parts.owners() * columns + torch.where(classes < 0, num_classes, classes)
    return cell.bincount(minlength=len(parts) * columns).view(len(parts), columns)


def _span(values: Tensor) -> str:
    """``"460"`` if all are equal, else ``"12 to 2,310"``."""
    if len(values) == 0:
        return "0"
    low = int(values.min())
    high = int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
