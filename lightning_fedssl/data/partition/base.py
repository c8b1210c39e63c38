"""How the training images are assigned to the server and the clients.

A partition is drawn once, from its own random stream, and written to ``partition.json``, so that
every method can run on the same one. Indices are positions in the data set's own training split,
whatever was held out for validation.

To add a partition, override the smallest function that it changes: :meth:`Partition.assign` (the
assignment of a pool of images to clients), or :meth:`Partition.split` if it also has its own rule
for the labelled images.
"""

from __future__ import annotations

import heapq
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.class_balance import (
    choose_balanced,
    class_sizes,
    even_counts,
    largest_remainder,
    positions_by_class,
)
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.index_lists import ClientList, IndexLists

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class Partition:
    """Base of all partitions: a class-balanced choice of labelled images, and a rule that assigns
    the others.

    A subclass overrides :meth:`assign`, or :meth:`split` for a rule that also decides which images
    are labelled.
    """

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Assigns a pool of images to the clients.

        Args:
            labels: Labels of the images in the pool, int64 ``(n,)``, in data-set order; n is at
                least ``num_clients``.
            num_clients: Number of clients, M.
            num_classes: Number of classes, K.
            generator: The random stream to draw from.

        Returns:
            For every client the positions of its images in ``labels``, int64; no position twice.
        """
        raise NotImplementedError(f"{type(self).__name__} must override assign or split")

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Assigns the images to server and clients, and decides which are labelled.

        The labelled images are balanced over the classes: ``num_labels // num_classes`` of each,
        the remainder one each to classes in drawn order (a class with too few images gives all it
        has, the others make up for it). With ``label_location="server"`` they go to the server and
        the rest is assigned; with ``"clients"`` all images are assigned and the labelled ones are
        marked where they lie.

        Args:
            request: The images, and what they are to be split into.
            generator: The random stream to draw from.

        Raises:
            ValueError: If there are fewer images than labels or clients; the message names the key.
        """
        available = torch.nonzero(request.labels >= 0).flatten()
        if request.label_location == "server":
            labeled = choose_labeled(request, available, generator)
            is_labeled = marked(len(request.labels), labeled)
            parts = self._assign_pool(request, available[~is_labeled[available]], generator)
            return FederatedSplit(request.seed, labeled, ClientList.mark(parts, is_labeled))
        parts = self._assign_pool(request, available, generator)
        labeled = choose_labeled(request, parts.values.sort().values, generator)
        return FederatedSplit(
            request.seed, labeled[:0], ClientList.mark(parts, marked(len(request.labels), labeled))
        )

    def add_unlabeled(
        self, split: FederatedSplit, request: SplitRequest, generator: Generator
    ) -> FederatedSplit:
        """Gives the images that have no label to the clients.

        No class is known of them, so no rule about classes applies: a random order is cut into
        equal parts, and the remainder goes one each to the first clients.

        Args:
            split: The partition of the other images.
            request: The images, ``request.without_label`` among them.
            generator: A random stream of its own.
        """
        return append_unlabeled(
            split, in_equal_parts(request.without_label, len(split.clients), generator)
        )

    def check(self, split: FederatedSplit, request: SplitRequest) -> None:
        """Refuses what a rule of a user's own may return by mistake; called with every split.

        Args:
            split: What :meth:`split` and :meth:`add_unlabeled` gave.
            request: What was to be split.

        Raises:
            ValueError: Naming the partition and the remedy.
        """
        source = f"data.partition: {type(self).__name__}"
        if len(split.clients) != request.num_clients:
            raise ValueError(
                f"{source} made {len(split.clients)} clients, but data.num_clients is "
                f"{request.num_clients}"
            )
        check_samples(
            split, request, source, "give numbers of samples whose SplitRequest.labels is not -1"
        )

    def _assign_pool(self, request: SplitRequest, pool: Tensor, generator: Generator) -> IndexLists:
        """Assigns the images of ``pool`` and returns sorted indices.

        An empty pool gives every client nothing, and one with fewer images than clients one each to
        some, if images without a label are enough for all clients.
        """
        clients = request.num_clients
        if len(pool) == 0:
            return IndexLists(pool, torch.zeros(clients, dtype=torch.int64))
        if clients > max(len(pool), len(request.without_label)):
            raise ValueError(
                f"data.num_clients: {clients} clients cannot share {len(pool)} samples; lower "
                "data.num_clients or leave more samples (data.num_labels, data.validation)"
            )
        if clients > len(pool):
            parts = list(torch.from_numpy(generator.permutation(len(pool))).tensor_split(clients))
        else:
            parts = self.assign(request.labels[pool], clients, request.num_classes, generator)
        try:
            lists = IndexLists.from_tensors(
                torch.as_tensor(part, dtype=torch.int64) for part in parts
            )
            if len(lists) != clients or (len(lists.values) and int(lists.values.min()) < 0):
                raise ValueError(
                    f"there are {len(lists)} lists for {clients} clients, or a number below 0"
                )
            return lists.lookup(pool).sorted()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"data.partition: {type(self).__name__}.assign must return for every client the "
                f"positions of its samples in labels, from 0: {error}"
            ) from error


class Iid(Partition):
    """Every client gets an equal, uniformly drawn share of the pool.

    Every client gets exactly floor(N / M) images; the few that remain are left out.

    Source: SemiFL (NeurIPS 2022), section 4, and its code.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> labels = torch.arange(100) % 10
        >>> [len(part) for part in Iid().assign(labels, 3, 10, np.random.default_rng(0))]
        [33, 33, 33]
    """

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Divides a random order of the pool into equal parts; see :meth:`Partition.assign`."""
        order = torch.from_numpy(generator.permutation(len(labels)))
        return list(order[: len(labels) // num_clients * num_clients].tensor_split(num_clients))


class Shards(Partition):
    """Every client holds images of at most ``classes_per_client`` classes.

    Every class is cut, in data-set order, into shards: ``classes_per_client * M`` in all, equally
    many of each class. The shards are shuffled, and each client gets ``classes_per_client`` of
    them, possibly two of one class.

    Source: SemiFL (NeurIPS 2022), section 4, "K = 2", and its code. Where the number of shards is
    not a multiple of the number of classes, classes in drawn order get one more.

    Args:
        classes_per_client: Shards per client, K in the paper.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> labels = torch.arange(100) % 10
        >>> parts = Shards(2).assign(labels, 5, 10, np.random.default_rng(0))
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(self, classes_per_client: int = 2) -> None:
        self.classes_per_client = at_least(1, "Shards", "classes_per_client", classes_per_client)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Cuts the classes into shards and assigns them; see :meth:`Partition.assign`."""
        capacity = class_sizes(labels, num_classes)
        num_shards = self.classes_per_client * num_clients
        if self.classes_per_client > num_classes or num_shards < (capacity > 0).sum():
            raise ValueError(
                f"data.partition: {num_shards} shards (classes_per_client * data.num_clients) "
                f"cannot hold all {num_classes} classes, or classes_per_client is above their "
                "number"
            )
        counts = even_counts(capacity, min(num_shards, len(labels)), generator)
        shards: list[NDArray[Any]] = []
        for members, count in zip(positions_by_class(labels, num_classes), counts, strict=True):
            if count:
                shards += np.array_split(members, count)
        parts: list[list[NDArray[Any]]] = [[] for _ in range(num_clients)]
        for place, shard in enumerate(generator.permutation(len(shards))):
            parts[place % num_clients].append(shards[shard])
        return [torch.from_numpy(np.concatenate(part)) for part in parts]


class Dirichlet(Partition):
    """Class proportions over the clients are drawn from a Dirichlet distribution, class by class.

    For every class a Dirichlet(alpha) vector over the clients is drawn; clients that already hold
    their fair share, N / M images, get nothing more; the class is cut in data-set order at the
    cumulative proportions.

    Source: SemiFL (NeurIPS 2022), section 4, "Dir(beta)", and its code, which repeats the whole
    draw until every client has ``min_size`` images. With many clients or a small alpha such a draw
    may practically never occur. Therefore images are moved here, one at a time, from the largest
    clients to those below the minimum.

    Args:
        alpha: Concentration, beta in SemiFL's paper; the smaller, the more uneven.
        min_size: Least number of images per client; lowered, with a warning, to what N images
            allow.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> labels = torch.arange(100) % 10
        >>> parts = Dirichlet(0.3, min_size=5).assign(labels, 4, 10, np.random.default_rng(0))
        >>> sum(map(len, parts)), min(map(len, parts)) >= 5
        (100, True)
    """

    def __init__(self, alpha: float = 0.3, min_size: int = 10) -> None:
        self.alpha = above_0("Dirichlet", "alpha", alpha)
        self.min_size = at_least(1, "Dirichlet", "min_size", min_size)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Draws proportions class by class, then tops up the smallest clients.

        See :meth:`Partition.assign`.
        """
        by_class = [members for members in positions_by_class(labels, num_classes) if len(members)]
        sizes = np.zeros(num_clients, dtype=np.int64)
        owners = []
        for members in by_class:
            below_share = np.flatnonzero(sizes < len(labels) / num_clients)
            cumulative = np.cumsum(dirichlet(self.alpha, len(below_share), generator))
            cuts = np.minimum(cumulative[:-1] * len(members), len(members)).astype(np.int64)
            counts = np.diff(cuts, prepend=0, append=len(members))
            owners.append(np.repeat(below_share, counts))
            sizes[below_share] += counts
        by_client = np.concatenate(by_class)[np.argsort(np.concatenate(owners), kind="stable")]
        parts = list(torch.from_numpy(by_client).split(sizes.tolist()))
        floor = min(self.min_size, len(labels) // num_clients)
        if floor < self.min_size:
            rank_zero_warn(
                f"data.partition: {len(labels)} samples are too few for {self.min_size} at each "
                f"of {num_clients} clients; every client gets at least {floor}"
            )
        _raise_to(floor, parts, generator)
        return parts


class ClientDirichlet(Partition):
    """Class proportions are drawn from a Dirichlet distribution client by client.

    Sizes come out uneven.

    For every client a Dirichlet(alpha) vector over the classes is drawn; each class is then divided
    among the clients in proportion to their entries for it, rounded by largest remainder, in a
    drawn order of its images. Every image is assigned; a client may get very few, and with a small
    alpha none: it skips its rounds.

    Source: the authors' code of Semi-SFL (arXiv 2307.15870), section V-D3, "Dir(alpha)".

    Args:
        alpha: Concentration; the smaller, the fewer classes a client has. Published: 0.1, and 0.01
            to 1.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = above_0("ClientDirichlet", "alpha", alpha)

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Draws every client's proportions, then divides class by class.

        See :meth:`Partition.assign`.
        """
        proportions = dirichlet_rows(self.alpha, num_clients, num_classes, generator)
        owner = np.empty(len(labels), dtype=np.int64)
        for label, members in enumerate(positions_by_class(labels, num_classes)):
            shares = (
                proportions[:, label] if proportions[:, label].sum() > 0 else np.ones(num_clients)
            )
            counts = largest_remainder(len(members), shares)
            owner[generator.permutation(members)] = np.repeat(np.arange(num_clients), counts)
        return held_by(owner, num_clients)


class FromFile(Partition):
    """The exact partition of an earlier run.

    The run must use the same data set, number of clients and labels, and must not hold out
    (``data.validation``, ``data.max_train_images``) an image that the file assigns: keep the seed
    of the earlier run too. With ``data.num_labels: all``, some clients may also be
    without any label: those of ``FullyLabeledClients``.

    Args:
        path: A ``partition.json`` that a run wrote; or a ``.pth`` file of the authors of RSCFed and
            CBAFed, ``{"data_partition": {client: [index, ...]}}``, whose samples are all labelled:
            give it as ``FullyLabeledClients.of``.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Reads the file; see :meth:`Partition.split`.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is damaged; the message names it.
        """
        if Path(self.path).suffix == ".pth" and Path(self.path).is_file():
            return _published(self.path, request.seed)
        return FederatedSplit.load(self.path)

    def check(self, split: FederatedSplit, request: SplitRequest) -> None:
        """Refuses a file that does not fit the configuration.

        The message names the key to change.
        """
        at_server = len(split.server_labeled)
        at_clients = len(split.client_list.labeled.values)
        if len(split.clients) != request.num_clients:
            raise ValueError(
                f"data.num_clients: {request.num_clients}, but {self.path!r} has "
                f"{len(split.clients)} clients"
            )
        # With labels at the clients the server may have images besides: ClassSkew's server_images.
        if at_clients if request.label_location == "server" else at_server and not at_clients:
            raise ValueError(
                f"data.label_location: {request.label_location!r}, but {self.path!r} has "
                f"{at_server} labels at the server and {at_clients} at the clients"
            )
        labeled = at_server if request.label_location == "server" else at_clients
        if request.num_labels not in ("all", labeled):
            raise ValueError(
                f"data.num_labels: {request.num_labels}, but {self.path!r} has {labeled} labels"
            )
        remedy = (
            "use the data set, seed_everything, data.validation and data.max_train_images of "
            "the run that wrote it"
        )
        check_samples(split, request, f"partition file {self.path!r}", remedy)
        hidden = split.client_list.unlabeled
        hides = hidden.select(request.labels[hidden.values] >= 0).sizes > 0
        # Clients may be without any label, beside others that have all: FullyLabeledClients.
        if at_clients:
            hides &= split.client_list.labeled.sizes > 0
        if request.num_labels == "all" and hides.any():
            raise ValueError(f"data.num_labels: all, but {self.path!r} has {labeled} labels")

    def add_unlabeled(
        self, split: FederatedSplit, request: SplitRequest, generator: Generator
    ) -> FederatedSplit:
        """The split as it is: the file assigns the images without labels, too."""
        return split


def _published(path: str, seed: int) -> FederatedSplit:
    """Clients whose samples are all labelled, from a file of RSCFed's and CBAFed's authors."""
    try:
        samples = torch.load(path, weights_only=True)["data_partition"]
        lists = IndexLists.from_tensors(
            torch.tensor(samples[k], dtype=torch.int64) for k in range(len(samples))
        )
    except Exception as error:  # of the file's format, or of what is in it
        raise ValueError(
            f"partition file {path!r} has no lists of samples under data_partition, one for each "
            f"client from 0 ({type(error).__name__}: {error})"
        ) from error
    none = lists.select(torch.zeros(len(lists.values), dtype=torch.bool))
    return FederatedSplit(seed, none.values, ClientList(lists.sorted(), none))


def require(owner: str, name: str, value: _Value, fits: bool, wanted: str) -> _Value:
    """The value of a partition's argument, if it fits.

    Args:
        owner: The partition's name.
        name: The argument.
        value: Its value.
        fits: Whether it can be used.
        wanted: What is needed, for the message.
    """
    if not fits:
        raise ValueError(f"data.partition: {name} of {owner} is {value!r}: give {wanted}")
    return value


def above_0(owner: str, name: str, value: _Value) -> _Value:
    """The value of a partition's argument, if it is a finite number above 0.

    Args:
        owner: The partition's name.
        name: The argument.
        value: Its value.
    """
    fits = 0 < value < math.inf  # type: ignore[operator]
    return require(owner, name, value, fits, "a finite number above 0")


def at_least(minimum: int, owner: str, name: str, value: int) -> int:
    """The value of a partition's argument, if it is not below a number.

    Args:
        minimum: The number.
        owner: The partition's name.
        name: The argument.
        value: Its value.
    """
    return require(owner, name, value, value >= minimum, f"{minimum} or more")


def check_samples(split: FederatedSplit, request: SplitRequest, source: str, remedy: str) -> None:
    """Refuse a split with a sample that does not exist, is held out, twice at a party, or labelled
    without a label.

    Parties may share samples; a warning says so, because it may be a mistake.

    Args:
        split: The split.
        request: What was to be split.
        source: What made it, for messages.
        remedy: What to do about a sample that there is not or that is held out.

    Raises:
        ValueError: Naming what made the split.
    """
    clients = split.client_list
    assigned = torch.cat([split.server_labeled, clients.labeled.values, clients.unlabeled.values])
    available = request.in_federation
    if len(assigned) and not 0 <= int(assigned.min()) <= int(assigned.max()) < len(available):
        raise ValueError(
            f"{source} names the samples {int(assigned.min())} to {int(assigned.max())} of "
            f"{len(available)}; {remedy}"
        )
    if (distinct := _count_distinct(assigned)) < len(assigned):
        server = torch.full_like(split.server_labeled, sampling.SERVER)
        owners = torch.cat([server, clients.labeled.owners(), clients.unlabeled.owners()])
        if torch.stack([owners, assigned]).unique(dim=1).shape[1] < len(assigned):
            raise ValueError(
                f"{source} assigns a sample twice to one client, or to the server; leave one of "
                "the two out"
            )
        _log.warning(
            "%s assigns %d samples, but only %d different ones: parties share",
            source,
            len(assigned),
            distinct,
        )
    if not available[assigned].all():
        raise ValueError(f"{source} assigns samples that this run holds out; {remedy}")
    labeled = torch.cat([split.server_labeled, clients.labeled.values])
    if (request.labels[labeled] < 0).any():
        raise ValueError(
            f"{source} gives samples without a label as labelled ones; they belong into unlabeled"
        )


def choose_labeled(request: SplitRequest, candidates: Tensor, generator: Generator) -> Tensor:
    """The labelled images among ``candidates``, sorted indices.

    Args:
        request: The images, and how many labels.
        candidates: Indices to choose from.
        generator: The random stream to draw from.

    Raises:
        ValueError: If there are too few images or labels; the message names the key.
    """
    num_labels = request.num_labels
    labels = request.labels[candidates]
    if num_labels == "all":
        return candidates
    classes = _count_distinct(labels)
    if not classes <= num_labels <= len(candidates):
        raise ValueError(
            f"data.num_labels: {num_labels} labels must cover {classes} classes, and be at most "
            f'the {len(candidates)} samples; or give "all"'
        )
    return candidates[choose_balanced(labels, num_labels, request.num_classes, generator)]


def marked(count: int, indices: Tensor) -> Tensor:
    """A mask of ``count`` entries, true at the indices."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[indices] = True
    return mask


def in_equal_parts(indices: Tensor, parts: int, generator: Generator) -> IndexLists:
    """A random order of indices cut into equal parts; the first parts get one more."""
    order = torch.from_numpy(generator.permutation(len(indices)))
    return IndexLists.from_tensors(indices[order].tensor_split(parts))


def append_unlabeled(split: FederatedSplit, further: IndexLists) -> FederatedSplit:
    """The split with further unlabelled images at the clients.

    Args:
        split: The partition so far.
        further: The further images of every client.
    """
    clients = split.client_list
    return replace(
        split, clients=ClientList(clients.labeled, clients.unlabeled.append(further).sorted())
    )


def _count_distinct(values: Tensor) -> int:
    """How many different numbers, from 0, there are."""
    return int((values.bincount() > 0).sum())


def held_by(owner: NDArray[np.int64], num_clients: int) -> list[Tensor]:
    """The positions of every client's images in ascending order.

    Args:
        owner: The client of each image, ``(images,)``.
        num_clients: M.
    """
    counts = np.bincount(owner, minlength=num_clients)
    order = torch.from_numpy(np.argsort(owner, kind="stable"))
    return list(order.split(counts.tolist()))


def dirichlet(alpha: float, size: int, generator: Generator) -> NDArray[Any]:
    """Proportions ``(size,)``; if the draw underflows, its limit for small alpha, which gives all
    to one client.

    Drawing over fewer clients equals drawing over all, setting some to zero and renormalising: a
    Dirichlet vector's renormalised parts are Dirichlet with the same parameters.
    """
    proportions = generator.dirichlet(np.full(size, min(alpha, 1e9)))
    if np.isfinite(proportions).all() and proportions.sum() > 0:
        return proportions
    proportions[:] = 0
    proportions[generator.integers(size)] = 1
    return proportions


def dirichlet_rows(alpha: float, rows: int, size: int, generator: Generator) -> NDArray[Any]:
    """Several draws of :func:`dirichlet`, ``(rows, size)``."""
    return np.stack([dirichlet(alpha, size, generator) for _ in range(rows)])


def _raise_to(floor: int, parts: list[Tensor], generator: Generator) -> None:
    """Moves drawn images from the largest clients until every client holds ``floor``; ``parts`` is
    changed in place.

    Of equally large clients the first gives.
    """
    sizes = list(map(len, parts))
    largest = [(-size, client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    for client in np.flatnonzero(np.array(sizes) < floor):
        while len(parts[client]) < floor:
            size, donor = largest[0]
            position = int(generator.integers(-size))
            part = parts[donor]
            parts[client] = torch.cat([parts[client], part[position : position + 1]])
            parts[donor] = torch.cat([part[:position], part[position + 1 :]])
            heapq.heapreplace(largest, (size + 1, donor))
