"""Partitions that also decide which classes each client has labels of, for methods whose clients
hold the labels.

All follow Fed-SHVR (arXiv 2111.00010, section V): equal shares, labels of two digits with
Dirichlet-assigned unlabelled images, and class-distribution mismatch. Details that the paper does
not give are ours; the docstrings say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.random import Generator
from numpy.typing import NDArray

from lightning_fedssl.data.partition.base import Partition, above_0, dirichlet_rows, require
from lightning_fedssl.data.partition.class_balance import largest_remainder, positions_by_class
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.index_lists import ClientList, IndexLists

Counts = NDArray[np.int64]

_LEAST_UNLABELED = 32
"""Fewest unlabelled images that a client of :class:`ClassMismatch` gets."""


class _LabelsAtClients(Partition):
    """Base: every client gets labelled images of its own classes, then the others are assigned as
    unlabelled ones.
    """

    def __init__(self, deal_as: int | None = None) -> None:
        self.deal_as = deal_as

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Assigns the images to server and clients, and decides which are labelled.

        See :meth:`Partition.split`.

        Raises:
            ValueError: If the labels are not at the clients, or a class has too few images; the
                message names the key.
        """
        if request.label_location != "clients":
            raise ValueError(
                f"data.label_location: {type(self).__name__} assigns labels to clients; set it to "
                "clients"
            )
        classes = request.num_classes
        members = list(map(generator.permutation, positions_by_class(request.labels, classes)))
        count = (self.deal_as or 0) if request.num_labels == "all" else request.num_labels
        client_classes = self.classes_of_clients(request.num_clients, classes, generator)
        quotas = label_quotas(count, client_classes)
        quotas = np.pad(quotas, ((0, 0), (0, classes - quotas.shape[1])))
        labeled, pool = take(members, quotas)
        left = np.array(list(map(len, pool)))
        unlabeled, _ = take(pool, self.unlabeled_counts(left, quotas, generator))
        if request.num_labels == "all":
            labeled = labeled.append(unlabeled)
            unlabeled = unlabeled.select(torch.zeros(len(unlabeled.values), dtype=torch.bool))
        clients = ClientList(labeled.sorted(), unlabeled.sorted())
        return FederatedSplit(request.seed, labeled.values[:0], clients)

    def classes_of_clients(
        self, num_clients: int, num_classes: int, generator: Generator
    ) -> list[list[int]]:
        """The classes every client has labels of."""
        return [self.classes_of(client, num_classes) for client in range(num_clients)]

    def classes_of(self, client: int, num_classes: int) -> list[int]:
        """The classes a client has labels of, by a rule without draws."""
        raise NotImplementedError

    def unlabeled_counts(self, sizes: Counts, quotas: Counts, generator: Generator) -> Counts:
        """How many unlabelled images of each class each client gets.

        Args:
            sizes: Images left of each class, ``(classes,)``.
            quotas: Labelled images of each client and class, ``(clients, classes)``.
            generator: The random stream to draw from.

        Returns:
            ``(clients, classes)``.
        """
        raise NotImplementedError


class Stratified(_LabelsAtClients):
    """IID with equal shares: every client gets as many images of each class, and as many labelled
    ones, as any other.

    Class sizes that the clients do not divide leave remainders; these go round, so that the
    clients' totals differ by one at most, unless a client has more labelled images of a class than
    its share of the class. With MNIST, 10 clients and 600 labels: 60 labelled and 5,940 unlabelled
    images each.

    Args:
        deal_as: With ``data.num_labels: all``, assign as if that many were labelled, so that each
            client holds the same images as in that run.
    """

    def classes_of(self, client: int, num_classes: int) -> list[int]:
        """Every class."""
        return list(range(num_classes))

    def unlabeled_counts(self, sizes: Counts, quotas: Counts, generator: Generator) -> Counts:
        """Equal shares of all images, less the labelled ones: ``(clients, classes)``."""
        clients = len(quotas)
        totals = sizes + quotas.sum(axis=0)
        shares = np.repeat(totals[None] // clients, clients, axis=0)
        first = 0
        for label, extra in enumerate(totals % clients):
            shares[(first + np.arange(extra)) % clients, label] += 1
            first += int(extra)
        counts = shares - quotas
        for label, client in np.argwhere(counts.T < 0):  # it has more labels than its share
            donor = counts[:, label].argmax()
            counts[donor, label] += counts[client, label]
            counts[client, label] = 0
        return counts


class LabeledClasses(_LabelsAtClients):
    """Labels of few classes at each client, as many of each.

    The unlabelled images of a class go to the clients in the proportions of a Dirichlet(alpha)
    draw, rounded by largest remainder, with no rule on sizes: a client may get none. The paper says
    "two digits" and "Dir_10(0.1)"; which two, and what is drawn, are ours.

    Args:
        classes_per_client: c, classes a client has labels of.
        alpha: Concentration of the unlabelled images; the smaller, the more uneven.
        pairs: ``even``: client k has labels of the classes ``c k, .., c k + c - 1`` modulo their
            number. ``random``: a random order of the classes is cut into groups of c for the first
            clients, so that each class is somewhere, and all others draw c classes each.
        draws: ``per_class``: a draw for every class, so that clients differ in their mixture of
            classes; ``amounts``: one draw for all classes, so that they differ in their number of
            images alone.
        deal_as: With ``data.num_labels: all``, assign as if that many were labelled, so that each
            client holds the same images as in that run; if left out, every image is assigned as an
            unlabelled one.
    """

    def __init__(
        self,
        classes_per_client: int = 2,
        alpha: float = 0.1,
        pairs: Literal["even", "random"] = "even",
        draws: Literal["per_class", "amounts"] = "per_class",
        deal_as: int | None = None,
    ) -> None:
        super().__init__(deal_as)
        name = "LabeledClasses"
        self.classes_per_client = above_0(name, "classes_per_client", classes_per_client)
        self.alpha = above_0(name, "alpha", alpha)
        self.pairs = require(name, "pairs", pairs, pairs in ("even", "random"), "even or random")
        is_valid = draws in ("per_class", "amounts")
        self.draws = require(name, "draws", draws, is_valid, "per_class or amounts")

    def classes_of(self, client: int, num_classes: int) -> list[int]:
        """``c`` neighbouring classes, beginning where the last client's end."""
        return _neighbours(client * self.classes_per_client, self.classes_per_client, num_classes)

    def classes_of_clients(
        self, num_clients: int, num_classes: int, generator: Generator
    ) -> list[list[int]]:
        """Neighbouring or random classes, by ``pairs``, in ascending order for each client."""
        neighbours = super().classes_of_clients(num_clients, num_classes, generator)
        if self.pairs == "even":
            return neighbours
        order = generator.permutation(num_classes)
        classes = []
        for client, even in enumerate(neighbours):
            chosen = order[client * self.classes_per_client :][: len(even)]
            others = generator.permutation(np.setdiff1d(order, chosen))
            classes.append(sorted([*chosen, *others[: len(even) - len(chosen)]]))
        return classes

    def unlabeled_counts(self, sizes: Counts, quotas: Counts, generator: Generator) -> Counts:
        """One Dirichlet draw over the clients per class, or for all: ``(clients, classes)``."""
        count = 1 if self.draws == "amounts" else len(sizes)
        draws = dirichlet_rows(self.alpha, count, len(quotas), generator)
        draws = np.broadcast_to(draws, (len(sizes), len(quotas)))
        return np.stack(list(map(largest_remainder, sizes, draws)), axis=1)


class ClassMismatch(_LabelsAtClients):
    """Class-distribution mismatch: a client's unlabelled images are, by a given share, of classes
    it has no labels of.

    Client k has labels of the classes ``k, .., k + c - 1`` modulo their number. Per class a
    Dirichlet(alpha) vector over the clients is drawn; a client's number of unlabelled images is
    proportional to the sum of its entries, and its images of a class to its entry. Clients with
    fewer than 32 get images of the largest, as far as there are enough in all. The paper names the
    ratio and "Dir_40(0.025)" without a procedure; this one is ours.

    Args:
        ratio: Mismatch ratio r, the share of a client's unlabelled images from classes it has no
            labels of.
        classes_per_client: c, classes a client has labels of.
        alpha: Concentration of the Dirichlet draw.
        num_unlabeled: Unlabelled images in all; every image that has no label if left out.
        sizes: Unlabelled images of a client: by the ``dirichlet`` draw, or ``equal``.
        deal_as: As in :class:`LabeledClasses`.
    """

    def __init__(
        self,
        ratio: float = 0.5,
        classes_per_client: int = 6,
        alpha: float = 0.025,
        num_unlabeled: int | None = None,
        sizes: Literal["dirichlet", "equal"] = "dirichlet",
        deal_as: int | None = None,
    ) -> None:
        super().__init__(deal_as)
        self.classes_per_client = above_0("ClassMismatch", "classes_per_client", classes_per_client)
        self.alpha = above_0("ClassMismatch", "alpha", alpha)
        self.ratio = require(
            "ClassMismatch", "ratio", ratio, 0 <= ratio <= 1, "a number from 0 to 1"
        )
        self.sizes = require(
            "ClassMismatch", "sizes", sizes, sizes in ("dirichlet", "equal"), "dirichlet or equal"
        )
        self.num_unlabeled = num_unlabeled

    def classes_of(self, client: int, num_classes: int) -> list[int]:
        """``c`` neighbouring classes, beginning one later than the last client's."""
        return _neighbours(client, self.classes_per_client, num_classes)

    def unlabeled_counts(self, sizes: Counts, quotas: Counts, generator: Generator) -> Counts:
        """Sizes first, then each client's classes inside and outside its labelled ones.

        See the base class.
        """
        clients, classes = quotas.shape
        available = int(sizes.sum())
        total = available if self.num_unlabeled is None else self.num_unlabeled
        requirement = f"at most {available}, what is left"
        require("ClassMismatch", "num_unlabeled", total, 0 <= total <= available, requirement)
        draws = dirichlet_rows(self.alpha, classes, clients, generator).T.copy()
        totals = self._totals(total, draws.sum(axis=1))
        left = sizes.copy()
        counts = np.zeros_like(quotas)
        elsewhere = 0
        for client in range(clients):
            inside = np.isin(np.arange(classes), self.classes_of(client, classes))
            outside = round(self.ratio * totals[client])
            weights = draws[client] + 1e-6
            of_client = counts[client]
            for part, number in ((~inside, outside), (inside, totals[client] - outside)):
                assigned = apportion(int(number), weights * part, left - of_client)
                of_client += assigned
                short = int(number - assigned.sum())
                of_client += apportion(short, weights, left - of_client)
                elsewhere += short
            left -= of_client
        if elsewhere:
            rank_zero_warn(
                f"data.partition: ClassMismatch ran out of samples: {elsewhere} of {total} "
                "unlabelled ones are of other classes than the ratio asks for"
            )
        return counts

    def _totals(self, total: int, shares: NDArray[Any]) -> Counts:
        """Unlabelled images of every client."""
        clients = len(shares)
        counts = largest_remainder(total, np.ones(clients) if self.sizes == "equal" else shares)
        floor = min(_LEAST_UNLABELED, total // clients)
        while counts.min() < floor:
            smallest = counts.argmin()
            largest = counts.argmax()
            moved = min(floor - counts[smallest], max(1, counts[largest] - floor))
            counts[smallest] += moved
            counts[largest] -= moved
        return counts


def label_quotas(num_labels: int, classes: Sequence[Sequence[int]]) -> Counts:
    """Labelled images of each client and class: equal totals over clients, equal over each client's
    classes.

    Remainders go to the first clients, and to classes in rotation: a client's extra labels begin
    with the class after the last extra label of the client before it that has the same classes.

    Args:
        num_labels: In all.
        classes: The classes of each client.

    Returns:
        ``(clients, highest class + 1)``.
    """
    clients = len(classes)
    quotas = np.zeros((clients, 1 + max(map(max, classes))), dtype=np.int64)
    first_extra: Counter[tuple[int, ...]] = Counter()
    for client, labeled in enumerate(classes):
        share, extra = divmod(num_labels // clients + (client < num_labels % clients), len(labeled))
        positions = np.arange(len(labeled)) - first_extra[tuple(labeled)]
        first_extra[tuple(labeled)] += extra
        quotas[client, labeled] = share + (positions % len(labeled) < extra)
    return quotas


def apportion(total: int, weights: NDArray[Any], capacity: Counts) -> Counts:
    """As :func:`largest_remainder` within capacities.

    What a full part cannot take goes to the others.

    Args:
        total: What to assign.
        weights: ``(parts,)``; a part of weight 0 gets nothing.
        capacity: Most that each part can take.

    Returns:
        ``(parts,)``; its sum falls short of ``total`` only if all parts with a weight are full.
    """
    counts = np.zeros_like(capacity)
    while (missing := total - int(counts.sum())) > 0:
        unfilled = np.where(counts < capacity, weights, 0)
        if not unfilled.sum():
            break
        counts += np.minimum(largest_remainder(missing, unfilled), capacity - counts)
    return counts


def take(members: Sequence[NDArray[Any]], counts: Counts) -> tuple[IndexLists, list[NDArray[Any]]]:
    """Each client's images, cut from the front of the classes, and what is left of the classes.

    Args:
        members: The images of every class, in the order in which they are taken.
        counts: How many of each class each client gets, ``(clients, classes)``.

    Raises:
        ValueError: If a class has too few images.
    """
    parts = []
    left = []
    for label, (count, part) in enumerate(zip(counts.sum(axis=0), members, strict=True)):
        if count > len(part):
            raise ValueError(
                f"data.num_labels: the clients would have {count} labelled samples of class "
                f"{label}, but there are only {len(part)}; ask for fewer labels"
            )
        parts.append(part[:count])
        left.append(part[count:])
    clients = np.tile(np.arange(len(counts)), len(members))
    owners = np.repeat(clients, counts.T.flatten())  # of the images, class by class
    values = torch.from_numpy(np.concatenate(parts)[np.argsort(owners, kind="stable")])
    return IndexLists(values, torch.from_numpy(counts.sum(axis=1))), left


def _neighbours(first: int, count: int, num_classes: int) -> list[int]:
    requirement = f"at most {num_classes}, the classes"
    require("this partition", "classes_per_client", count, count <= num_classes, requirement)
    return [(first + i) % num_classes for i in range(count)]
