"""How the training images are dealt to the server and the clients.

A partition is drawn once, from its own random stream, and written to ``partition.json``, so that every method can run
on the same one. Indices are positions in the data set's own training split, whatever was held out for validation.

To add a partition, override the smallest thing it changes: :meth:`Partition.deal` (how a pool of images is dealt), or
:meth:`Partition.split` where the labelled images follow a rule of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

LabelLocation = Literal["server", "clients"]


class ClientIndices(NamedTuple):
    """The images of one client.

    Attributes:
        labeled: Indices of its labelled images, int64 ``(labelled,)``.
        unlabeled: Indices of its unlabelled images, int64 ``(unlabelled,)``.
    """

    labeled: Tensor
    unlabeled: Tensor


@dataclass(frozen=True, eq=False)
class FederatedSplit:
    """Who holds which training image.

    Attributes:
        seed: The seed that the split was drawn with.
        server_labeled: Indices of the server's labelled images, int64 ``(labelled,)``.
        clients: The images of every client.
    """

    seed: int
    server_labeled: Tensor
    clients: Sequence[ClientIndices]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over seed and indices; equal for equal splits."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def num_labeled(self) -> int:
        """Number of labelled images, at the server and at the clients."""
        return len(self.server_labeled) + sum(len(client.labeled) for client in self.clients)

    def save(self, path: str | Path) -> None:
        """Writes the split as JSON with the keys ``seed``, ``server_labeled``, ``clients`` and ``hash``.

        Args:
            path: The file; it is replaced in one step, so that a reader never sees half of it.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**self._content(), "hash": self.hash}), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> FederatedSplit:
        """Reads a split that :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is not a split, or its content does not fit its hash.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"partition file {str(path)!r} does not exist; give the partition.json of a run")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            split = cls(
                seed=int(content["seed"]),
                server_labeled=_index_tensor(content["server_labeled"]),
                clients=[
                    ClientIndices(_index_tensor(client["labeled"]), _index_tensor(client["unlabeled"]))
                    for client in content["clients"]
                ],
            )
            stored_hash = content["hash"]
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"partition file {str(path)!r} is damaged or not a partition ({type(error).__name__}: {error}); it "
                "needs the keys seed, server_labeled, clients (a list of labeled and unlabeled indices) and hash"
            ) from error
        if split.hash != stored_hash:
            raise ValueError(
                f"partition file {str(path)!r} was changed after it was written: its content does not fit its hash; "
                "use the file that the run wrote, or draw a new partition"
            )
        return split

    def _content(self) -> dict[str, Any]:
        clients = [{"labeled": c.labeled.tolist(), "unlabeled": c.unlabeled.tolist()} for c in self.clients]
        return {"seed": self.seed, "server_labeled": self.server_labeled.tolist(), "clients": clients}


def _index_tensor(values: Any) -> Tensor:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError("indices must be a list of integers from 0")
    return torch.tensor(values, dtype=torch.int64)


class Partition:
    """Base of all partitions: a class-balanced choice of labelled images, and a rule that deals the others.

    A subclass overrides :meth:`deal`, or :meth:`split` for a rule that also decides which images are labelled.
    """

    def deal(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> list[Tensor]:
        """Deals a pool of images to the clients.

        Args:
            labels: Labels of the images in the pool, int64 ``(n,)``, in data-set order; n is at least ``num_clients``.
            num_clients: Number of clients, M.
            num_classes: Number of classes, K.
            generator: The random stream to draw from.

        Returns:
            For every client the positions of its images in ``labels``, int64; no position twice.
        """
        raise NotImplementedError(f"{type(self).__name__} must override deal or split")

    def split(
        self,
        labels: Tensor,
        num_classes: int,
        num_clients: int,
        num_labels: int | Literal["all"],
        label_location: LabelLocation,
        generator: np.random.Generator,
        seed: int = 0,
    ) -> FederatedSplit:
        """Decides who holds which image, and which are labelled.

        The labelled images are balanced over the classes: ``num_labels // num_classes`` of each, the remainder one each
        to classes in drawn order (a class with too few images gives all it has, the others make up for it). With
        ``label_location="server"`` they go to the server and the rest is dealt; with ``"clients"`` all images are dealt
        and the labelled ones are marked where they lie.

        Args:
            labels: Labels of all training images, int64 ``(N,)``; -1 marks an image that is held out of the federation.
            num_classes: Number of classes, K.
            num_clients: Number of clients, M.
            num_labels: Number of labelled images in the federation, or ``"all"``.
            label_location: Where the labelled images are.
            generator: The random stream to draw from.
            seed: The seed to note in the split.

        Raises:
            ValueError: If there are fewer images than labels or clients; the message names the key.
        """
        available = torch.nonzero(labels >= 0).flatten()
        if label_location == "server":
            labeled = _choose_labeled(labels, available, num_labels, num_classes, generator)
            pool = _without(available, labeled)
            parts = self._deal_pool(labels, pool, num_clients, num_classes, generator)
            return FederatedSplit(seed, labeled, [ClientIndices(labeled[:0], part) for part in parts])
        parts = self._deal_pool(labels, available, num_clients, num_classes, generator)
        labeled = _choose_labeled(labels, torch.cat(parts).sort().values, num_labels, num_classes, generator)
        is_labeled = torch.zeros(len(labels), dtype=torch.bool)
        is_labeled[labeled] = True
        clients = [ClientIndices(part[is_labeled[part]], part[~is_labeled[part]]) for part in parts]
        return FederatedSplit(seed, labeled[:0], clients)

    def _deal_pool(
        self, labels: Tensor, pool: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator
    ) -> list[Tensor]:
        """Deals the images of ``pool`` and returns sorted indices; an empty pool gives every client nothing."""
        if len(pool) == 0:
            return [pool] * num_clients
        if num_clients > len(pool):
            raise ValueError(
                f"data.num_clients: {num_clients} clients cannot share {len(pool)} images; lower data.num_clients or "
                "leave more images (data.num_labels, data.validation)"
            )
        dealt = self.deal(labels[pool], num_clients, num_classes, generator)
        positions = torch.cat(dealt)
        if len(dealt) != num_clients or _count_distinct(positions) != len(positions):
            raise ValueError(f"{type(self).__name__}.deal must give {num_clients} clients positions without repetition")
        return [pool[part].sort().values for part in dealt]


class Iid(Partition):
    """Every client gets an equal, uniformly drawn share of the pool.

    Source: SemiFL (NeurIPS 2022), section 4; its code drops the remainder.

    Args:
        drop_remainder: Give every client exactly floor(N / M) images and leave out the few that remain. If false, they
            go one each to the first clients.
    """

    def __init__(self, drop_remainder: bool = True) -> None:
        self.drop_remainder = drop_remainder

    def deal(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> list[Tensor]:
        """Cuts a random order of the pool into equal parts; see :meth:`Partition.deal`."""
        order = torch.from_numpy(generator.permutation(len(labels)))
        if self.drop_remainder:
            order = order[: len(labels) // num_clients * num_clients]
        return list(order.tensor_split(num_clients))


class Shards(Partition):
    """Every client holds images of at most ``classes_per_client`` classes.

    Every class is cut, in data-set order, into shards: ``classes_per_client * M`` in all, equally many of each class.
    The shards are shuffled and dealt ``classes_per_client`` to a client, who may draw one class twice.

    Source: SemiFL (NeurIPS 2022), section 4, "K = 2", and its code. Where the number of shards is not a multiple of the
    number of classes, classes in drawn order get one more.

    Args:
        classes_per_client: Shards per client, K in the paper.
    """

    def __init__(self, classes_per_client: int = 2) -> None:
        if classes_per_client < 1:
            raise ValueError(f"data.partition: classes_per_client must be at least 1, got {classes_per_client}")
        self.classes_per_client = classes_per_client

    def deal(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> list[Tensor]:
        """Cuts the classes into shards and deals them; see :meth:`Partition.deal`."""
        by_class = _positions_by_class(labels, num_classes)
        capacity = np.array([len(members) for members in by_class])
        wanted = self.classes_per_client * num_clients
        self._check(wanted, num_classes, int((capacity > 0).sum()))
        counts = even_counts(capacity, min(wanted, len(labels)), generator)
        shards = [
            shard
            for members, count in zip(by_class, counts, strict=True)
            if count
            for shard in np.array_split(members, count)
        ]
        order = generator.permutation(len(shards))
        hands = (order[client::num_clients] for client in range(num_clients))
        return [torch.from_numpy(np.concatenate([shards[index] for index in hand])) for hand in hands]

    def _check(self, wanted: int, num_classes: int, present: int) -> None:
        if self.classes_per_client > num_classes:
            raise ValueError(
                f"data.partition: classes_per_client is {self.classes_per_client}, but the data set has only "
                f"{num_classes} classes; lower it"
            )
        if wanted < present:
            raise ValueError(
                f"data.partition: {wanted} shards (classes_per_client * data.num_clients) cannot hold all {present} "
                "classes; raise classes_per_client or data.num_clients"
            )


class Dirichlet(Partition):
    """Class proportions over the clients are drawn from a Dirichlet distribution, class by class.

    For every class a Dirichlet(alpha) vector over the clients is drawn; clients that already hold their fair share,
    N / M images, get nothing more; the class is cut in data-set order at the cumulative proportions.

    Source: SemiFL (NeurIPS 2022), section 4, "Dir(beta)", and its code, which repeats the whole draw until every client
    holds ``min_size`` images. With many clients or a small alpha no draw may ever do, so here images are moved, one at
    a time, from the largest clients to those below the minimum.

    Args:
        alpha: Concentration, beta in the paper; the smaller, the more uneven.
        min_size: Least number of images per client; lowered, with a warning, to what N images allow.
    """

    def __init__(self, alpha: float = 0.3, min_size: int = 10) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"data.partition: alpha of Dirichlet must be a finite number above 0, got {alpha}")
        if min_size < 1:
            raise ValueError(f"data.partition: min_size of Dirichlet must be at least 1, got {min_size}")
        self.alpha = alpha
        self.min_size = min_size

    def deal(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> list[Tensor]:
        """Draws proportions class by class, then tops up the smallest clients; see :meth:`Partition.deal`."""
        parts: list[list[int]] = [[] for _ in range(num_clients)]
        for members in _positions_by_class(labels, num_classes):
            if len(members) == 0:
                continue
            below_share = [client for client in range(num_clients) if len(parts[client]) < len(labels) / num_clients]
            cumulative = np.cumsum(_dirichlet(self.alpha, len(below_share), generator))
            cuts = np.minimum(cumulative[:-1] * len(members), len(members)).astype(np.int64)
            for client, share in zip(below_share, np.split(members, cuts), strict=True):
                parts[client].extend(share.tolist())
        _raise_to(self._floor(len(labels), num_clients), parts, generator)
        return [torch.tensor(part, dtype=torch.int64) for part in parts]

    def _floor(self, count: int, num_clients: int) -> int:
        feasible = min(self.min_size, count // num_clients)
        if feasible < self.min_size:
            rank_zero_warn(
                f"data.partition: {count} images are too few for {self.min_size} at each of {num_clients} clients; "
                f"every client gets at least {feasible}"
            )
        return feasible


class ClientDirichlet(Partition):
    """Class proportions are drawn from a Dirichlet distribution client by client; sizes come out uneven.

    For every client a Dirichlet(alpha) vector over the classes is drawn; each class is then divided among the clients
    in proportion to their entries for it, rounded by largest remainder, in a drawn order of its images. Every image is
    dealt; a client may get very few, and with a small alpha none: it sits out.

    Source: the authors' code of Semi-SFL (arXiv 2307.15870), section V-D3, "Dir(alpha)".

    Args:
        alpha: Concentration; the smaller, the fewer classes a client has. Published: 0.1, and 0.01 to 1.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"data.partition: alpha of ClientDirichlet must be a finite number above 0, got {alpha}")
        self.alpha = alpha

    def deal(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> list[Tensor]:
        """Draws every client's proportions, then divides class by class; see :meth:`Partition.deal`."""
        wanted = np.stack([_dirichlet(self.alpha, num_classes, generator) for _ in range(num_clients)])
        parts: list[list[NDArray[Any]]] = [[] for _ in range(num_clients)]
        for label, members in enumerate(_positions_by_class(labels, num_classes)):
            shares = wanted[:, label] if wanted[:, label].sum() > 0 else np.ones(num_clients)
            exact = shares / shares.sum() * len(members)
            counts = np.floor(exact).astype(np.int64)
            counts[np.argsort(counts - exact, kind="stable")[: len(members) - counts.sum()]] += 1
            dealt = np.split(generator.permutation(members), np.cumsum(counts[:-1]))
            for part, share in zip(parts, dealt, strict=True):
                part.append(share)
        return [torch.from_numpy(np.concatenate(part)) for part in parts]


class FromFile(Partition):
    """The partition of an earlier run, to the image.

    The run must use the same data set, number of clients and labels, and must not hold out (``data.validation``,
    ``data.max_train_images``) an image that the file deals: keep the seed of the earlier run too.

    Args:
        path: A ``partition.json`` that a run wrote.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def split(
        self,
        labels: Tensor,
        num_classes: int,
        num_clients: int,
        num_labels: int | Literal["all"],
        label_location: LabelLocation,
        generator: np.random.Generator,
        seed: int = 0,
    ) -> FederatedSplit:
        """Reads the file and checks that it fits the configuration; see :meth:`Partition.split`.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is damaged or does not fit; the message names the key.
        """
        split = FederatedSplit.load(self.path)
        self._check_setting(split, num_clients, num_labels, label_location)
        self._check_images(split, labels)
        return split

    def _check_setting(
        self, split: FederatedSplit, num_clients: int, num_labels: int | Literal["all"], label_location: LabelLocation
    ) -> None:
        everything = num_labels == "all"
        asked = _size(split) if everything else num_labels
        if len(split.clients) != num_clients:
            raise ValueError(f"data.num_clients: {num_clients}, but {self.path!r} has {len(split.clients)} clients")
        if split.num_labeled != asked:
            raise ValueError(f"data.num_labels: {num_labels}, but {self.path!r} has {split.num_labeled} labels")
        if (len(split.server_labeled) > 0) != (label_location == "server"):
            raise ValueError(f"data.label_location: {label_location!r}, but {self.path!r} has the labels elsewhere")

    def _check_images(self, split: FederatedSplit, labels: Tensor) -> None:
        dealt = _all_indices(split)
        if len(dealt) != _count_distinct(dealt):
            raise ValueError(f"partition file {self.path!r} deals an image twice")
        if len(dealt) and dealt.max() >= len(labels):
            raise ValueError(
                f"partition file {self.path!r} names image {int(dealt.max())}, but the training split has "
                f"{len(labels)} images; use the data set (data.dataset) it was made for"
            )
        if (labels[dealt] < 0).any():
            raise ValueError(
                f"partition file {self.path!r} deals images that this run holds out; use the seed_everything, "
                "data.validation and data.max_train_images of the run that wrote it"
            )


def even_counts(capacity: NDArray[Any], total: int, generator: np.random.Generator) -> NDArray[Any]:
    """Spreads ``total`` over bins as evenly as their capacities allow.

    Args:
        capacity: Most that every bin can take, ``(bins,)``; their sum is at least ``total``.
        total: What to spread.
        generator: Draws the bins that get one more.

    Returns:
        ``(bins,)`` int64 with sum ``total``; bins that are not full differ by at most one.
    """
    counts = np.zeros(len(capacity), dtype=np.int64)
    while (missing := total - int(counts.sum())) > 0:
        unfilled = np.flatnonzero(counts < capacity)
        if missing < len(unfilled):
            counts[generator.permutation(unfilled)[:missing]] += 1
        else:
            counts[unfilled] = np.minimum(capacity[unfilled], counts[unfilled] + missing // len(unfilled))
    return counts


def choose_balanced(labels: Tensor, count: int, num_classes: int, generator: np.random.Generator) -> Tensor:
    """Positions of ``count`` images, equally many of each class as far as the classes reach, sorted.

    Args:
        labels: int64 ``(n,)``, n at least ``count``.
        count: Number of images to choose.
        num_classes: Number of classes.
        generator: The random stream to draw from.
    """
    by_class = _positions_by_class(labels, num_classes)
    counts = even_counts(np.array([len(members) for members in by_class]), count, generator)
    return _choose(by_class, counts, generator)


def choose_stratified(labels: Tensor, count: int, num_classes: int, generator: np.random.Generator) -> Tensor:
    """Positions of ``count`` images in the proportions of the classes (largest remainder), sorted.

    Args:
        labels: int64 ``(n,)``, n at least ``count``.
        count: Number of images to choose.
        num_classes: Number of classes.
        generator: The random stream to draw from.
    """
    by_class = _positions_by_class(labels, num_classes)
    exact = np.array([len(members) for members in by_class]) * (count / max(len(labels), 1))
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: count - counts.sum()]] += 1
    return _choose(by_class, counts, generator)


def _choose(by_class: list[NDArray[Any]], counts: NDArray[Any], generator: np.random.Generator) -> Tensor:
    chosen = [generator.choice(members, size=n, replace=False) for members, n in zip(by_class, counts, strict=True)]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def _positions_by_class(labels: Tensor, num_classes: int) -> list[NDArray[Any]]:
    """For every class the positions of its images, in data-set order."""
    values = labels.cpu().numpy()
    return [np.flatnonzero(values == label) for label in range(num_classes)]


def _choose_labeled(
    labels: Tensor,
    candidates: Tensor,
    num_labels: int | Literal["all"],
    num_classes: int,
    generator: np.random.Generator,
) -> Tensor:
    """The labelled images among ``candidates``, sorted indices."""
    if num_labels == "all":
        return candidates
    present = _count_distinct(labels[candidates])
    if num_labels > len(candidates):
        raise ValueError(
            f"data.num_labels: {num_labels} labels, but only {len(candidates)} training images to label; "
            f'ask for at most {len(candidates)}, or "all"'
        )
    if num_labels < present:
        raise ValueError(f"data.num_labels: {num_labels} labels cannot cover {present} classes; ask for more")
    return candidates[choose_balanced(labels[candidates], num_labels, num_classes, generator)]


def _count_distinct(values: Tensor) -> int:
    return len(np.unique(values.numpy()))


def _without(indices: Tensor, removed: Tensor) -> Tensor:
    return indices[~torch.isin(indices, removed)]


def _dirichlet(alpha: float, size: int, generator: np.random.Generator) -> NDArray[Any]:
    """Proportions ``(size,)``; where the draw underflows, its limit for small alpha: everything to one client.

    Drawing over fewer clients equals drawing over all, setting some to zero and renormalising: a Dirichlet vector's
    renormalised parts are Dirichlet with the same parameters.
    """
    drawn = generator.dirichlet(np.full(size, min(alpha, 1e9)))
    if np.isfinite(drawn).all() and drawn.sum() > 0:
        return drawn
    drawn[:] = 0
    drawn[generator.integers(size)] = 1
    return drawn


def _raise_to(floor: int, parts: list[list[int]], generator: np.random.Generator) -> None:
    """Moves drawn images from the largest clients until every client holds ``floor``; changes ``parts``."""
    sizes = np.array([len(part) for part in parts])
    for client in np.flatnonzero(sizes < floor):
        while sizes[client] < floor:
            donor = int(sizes.argmax())
            parts[client].append(parts[donor].pop(int(generator.integers(sizes[donor]))))
            sizes[donor] -= 1
            sizes[client] += 1


def _all_indices(split: FederatedSplit) -> Tensor:
    return torch.cat([split.server_labeled, *(indices for client in split.clients for indices in client)])


def _size(split: FederatedSplit) -> int:
    return len(_all_indices(split))


@dataclass(frozen=True, eq=False)
class PartitionStatistics:
    """What a partition is like; true labels are counted, so it is for reports only.

    Attributes:
        class_counts: Images per client and class, labelled or not, int64 ``(M, K)``.
        labeled_class_counts: Labelled images per client and class, int64 ``(M, K)``.
        server_class_counts: The server's labelled images per class, int64 ``(K,)``.
        seed: The seed that the partition was drawn with.
        hash: The partition's hash.
    """

    class_counts: Tensor
    labeled_class_counts: Tensor
    server_class_counts: Tensor
    seed: int
    hash: str

    @property
    def sizes(self) -> Tensor:
        """Images per client, int64 ``(M,)``."""
        return self.class_counts.sum(dim=1)

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
        """Class shares of every client that holds an image, float64 ``(clients with images, K)``."""
        counts = self.class_counts[self.sizes > 0].double()
        return counts / counts.sum(dim=1, keepdim=True)

    @cached_property
    def class_skew(self) -> float:
        """R: the mean over pairs of clients of half the L1 distance of their class histograms, 0..1.

        0: all clients alike; 1: no two clients share a class. FedRGD (IEEE BigData 2021), Definition 2. The sum over
        pairs is taken from the sorted shares of each class, in O(K M log M).
        """
        clients = len(self.histograms)
        if clients < 2:
            return 0.0
        rank_weights = 2 * torch.arange(clients, dtype=torch.float64) - (clients - 1)
        distances = (self.histograms.sort(dim=0).values * rank_weights[:, None]).sum()
        return float(distances / (clients * (clients - 1)))

    @cached_property
    def effective_classes(self) -> float:
        """The mean over clients of exp(entropy of its class histogram): 1 for one class, K for all alike."""
        if len(self.histograms) == 0:
            return 0.0
        return float(torch.special.entr(self.histograms).sum(dim=1).exp().mean())

    def summary(self) -> str:
        """The partition in a few plain lines."""
        server = int(self.server_class_counts.sum())
        lines = [
            f"{_plural(len(self.sizes), 'client')}: {_span(self.sizes)} images each, {int(self.sizes.sum()):,} in all",
            f"server: {_plural(server, 'labelled image')}, {_span(self.server_class_counts)} of each class",
            f"clients: {_plural(int(self.labeled.sum()), 'labelled image')}, {_span(self.labeled)} at each client",
            f"classes per client: {_span(self.classes_per_client)}, effectively {self.effective_classes:.2f} (mean)",
            f"class skew R = {self.class_skew:.3f} (0: all clients alike, 1: no class in common)",
            f"drawn with seed {self.seed}, hash {self.hash[:12]}",
        ]
        return "\n".join(line for line in lines if not line.startswith(("server: 0", "clients: 0")))


def statistics(split: FederatedSplit, labels: Tensor, num_classes: int) -> PartitionStatistics:
    """Counts what every client of a split holds.

    Args:
        split: The split.
        labels: True labels of all training images, int64 ``(N,)``.
        num_classes: Number of classes, K.
    """
    return PartitionStatistics(
        class_counts=_count([torch.cat(client) for client in split.clients], labels, num_classes),
        labeled_class_counts=_count([client.labeled for client in split.clients], labels, num_classes),
        server_class_counts=labels[split.server_labeled].bincount(minlength=num_classes),
        seed=split.seed,
        hash=split.hash,
    )


def _count(parts: Sequence[Tensor], labels: Tensor, num_classes: int) -> Tensor:
    """How many images of each class every part holds, int64 ``(parts, K)``."""
    owner = torch.repeat_interleave(
        torch.arange(len(parts)), torch.tensor([len(part) for part in parts], dtype=torch.int64)
    )
    cell = owner * num_classes + labels[torch.cat([labels[:0], *parts])]
    return cell.bincount(minlength=len(parts) * num_classes).view(len(parts), num_classes)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _span(values: Tensor) -> str:
    """``"460"`` if all are equal, else ``"12 to 2,310"``."""
    if len(values) == 0:
        return "0"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def heatmap(stats: PartitionStatistics) -> Tensor:
    """A picture of a partition: how many images of each class (row) every client (column) holds.

    Drawn with matplotlib where it is installed (the extra ``plots``), else as a plain colour map without text.

    Args:
        stats: What to draw.

    Returns:
        uint8 ``(3, height, width)``, as TensorBoard's ``add_image`` takes it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return _plain_heatmap(stats)
    return _drawn_heatmap(stats)


def _plain_heatmap(stats: PartitionStatistics) -> Tensor:
    """White to blue, classes from the bottom, cells of equal size."""
    share = (stats.class_counts.T.flip(0).double() / max(int(stats.class_counts.max()), 1)).sqrt()
    deep_blue = torch.tensor([8.0, 48.0, 107.0], dtype=torch.float64)
    colours = (255 + share * (deep_blue[:, None, None] - 255)).round().to(torch.uint8)
    clients, classes = stats.class_counts.shape
    tall, wide = max(1, 320 // classes), max(1, 960 // clients)
    return colours.repeat_interleave(tall, dim=1).repeat_interleave(wide, dim=2)


def _drawn_heatmap(stats: PartitionStatistics) -> Tensor:
    """The heat map with axes and a title, under a strip of client sizes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = stats.class_counts.shape
    figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 3.6), width_ratios=(60, 1))
    sizes_axes, map_axes = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    edges = (-0.5, clients - 0.5)
    sizes_axes.stairs(stats.sizes.numpy(), np.arange(clients + 1) - 0.5, fill=True, color="#6baed6")
    sizes_axes.set(xlim=edges, ylabel="images", xticks=[], ylim=(0, max(float(stats.sizes.max()), 1.0) * 1.08))
    sizes_axes.spines[["top", "right"]].set_visible(False)
    # A square-root scale, or the few large shares of a skewed partition would wash out all others.
    scale = PowerNorm(0.5, vmin=0, vmax=max(int(stats.class_counts.max()), 1))
    counts = stats.class_counts.T.numpy()
    cells = map_axes.imshow(counts, cmap="Blues", norm=scale, aspect="auto", origin="lower", interpolation="nearest")
    map_axes.hlines(np.arange(classes - 1) + 0.5, *edges, color="white", linewidth=1 if classes <= 50 else 0)
    map_axes.set(xlabel="client", ylabel="class", xlim=edges)
    map_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if classes <= 20:
        map_axes.set_yticks(range(classes))
    bar = figure.colorbar(cells, cax=figure.add_subplot(grid[1, 1]), label="images of the class")
    frames: list[Any] = [*map_axes.spines.values(), bar.outline]
    for frame in frames:
        frame.set_visible(False)
    figure.suptitle(
        f"{_plural(clients, 'client')}, {_span(stats.sizes)} images each: class skew R = {stats.class_skew:.2f}, "
        f"{stats.effective_classes:.1f} effective classes per client",
        fontsize=11,
    )
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
