"""Data loaders of clients and server in place of a data set."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from lightning_fedssl import sampling
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.data.partition.statistics import PartitionStatistics

Loaders = dict[str, Any]
"""A party's loaders by kind, ``labeled`` and ``unlabeled``; one of them may be missing."""

_NONE = torch.zeros(0, dtype=torch.int64)


class LoaderData(FederatedDataModule):
    """Data loaders of clients and server in place of a data set.

    Args:
        clients: A loader for each client, or its ``{"labeled": loader, "unlabeled": loader}``. The
            items of a list or tuple are checked and counted at once; those of any other sequence
            when their clients are drawn.
        server: The server's loader of labelled batches, if it has one; a client's loader without a
            kind then is ``unlabeled``.
        evaluated: The loaders for ``validate`` and ``test``, as Lightning's Trainer takes them;
            None for none.

    Raises:
        ValueError: Names the loader whose samples cannot be counted.
    """

    def __init__(self, clients: Sequence[Any], server: Any, evaluated: Mapping[str, Any]) -> None:
        if not hasattr(clients, "__getitem__") or not len(clients):
            raise ValueError(
                f"from_lightning: clients is {'a' if clients else 'an empty'} "
                f"{type(clients).__name__}: give a list with a data loader for each client"
            )
        validation: Any = 0 if evaluated["validate"] is None else "test"
        super().__init__(num_clients=len(clients), validation=validation)
        self.spec = DatasetSpec("data loaders", 0, (1,), (0.0,), (1.0,), (), pixels=False)
        self.clients = clients
        self.server = server
        self.evaluated = evaluated
        self.sizes = [1] * len(clients)
        self.noun = "loader"
        if isinstance(clients, (list, tuple)):
            self.sizes = list(map(samples_of, map(self.loaders, range(len(clients)))))
            self.noun = "sample"

    def loaders(self, party: int) -> Loaders:
        """The loaders of a client, or of the server, which may have none."""
        if party == sampling.SERVER:
            name, kind = "server", "labeled"
            loaders = {} if self.server is None else self.server
        else:
            name, kind = f"clients[{party}]", "labeled" if self.server is None else "unlabeled"
            loaders = self.clients[party]
        loaders = dict(loaders) if isinstance(loaders, Mapping) else {kind: loaders}
        for kind, loader in loaders.items():
            _check(loader, kind, name)
        return loaders

    def setup(self, stage: str | None = None) -> None:
        """Number what clients have: the partition."""
        self.seed = sampling.global_seed()
        sizes = torch.tensor(self.sizes)
        rows = torch.arange(int(sizes.sum())).split(self.sizes)
        self.split = FederatedSplit(self.seed, _NONE, [ClientIndices(_NONE, r) for r in rows])
        classes = torch.zeros(len(rows), 0, dtype=torch.int64)
        self.statistics = PartitionStatistics(
            classes, classes, _NONE, self.seed, self.split.hash, sizes, self.noun
        )

    def to(self, device: torch.device | str) -> None:
        """Remember the device: Lightning's Trainer moves the batches."""
        self.none = _NONE.to(device)

    def local_data(self, party: int, round_index: int, *args: Any) -> LocalData:
        """Party, round and seed; no samples."""
        none, views = self.none, cast(Any, None)
        return LocalData(party, round_index, self.seed, none, none, none, none, 1, views)

    @property
    def validation_labels(self) -> Tensor:
        """None that are known, ``(0,)``."""
        return _NONE

    @property
    def test_labels(self) -> Tensor:
        """None that are known, ``(0,)``."""
        return _NONE

    def evaluation_batches(self, stage: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The stage with its loaders as one batch; none without loaders."""
        loaders = self.evaluated[stage]
        return iter([] if loaders is None else [(stage, loaders)])

    def predict_files(self) -> list[str]:
        """Refuse to predict: the module may have any output."""
        raise ValueError(
            "predict with lightning.Trainer().predict(module, loader): the module has the global "
            "weights"
        )


def samples_of(loaders: Loaders) -> int:
    """The samples that an epoch of a party draws, a client's weight; not those of its data set.

    Args:
        loaders: By kind.
    """
    return sum(map(_drawn, loaders.values()))


def _drawn(loader: Any) -> int:
    batches: Any = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        with isolate_rng():
            return sum(map(len, islice(batches, len(loader))))
    streams = isinstance(loader.dataset, IterableDataset)
    source: Any = loader.dataset if streams else (loader if batches is None else batches).sampler
    return len(source) if batches is None else min(len(source), len(loader) * batches.batch_size)


def _check(loader: Any, kind: str, name: str) -> None:
    if kind not in ("labeled", "unlabeled"):
        raise ValueError(f"from_lightning: {name} has {kind!r}: give labeled, unlabeled or both")
    try:
        count = _drawn(loader)
    except (AttributeError, TypeError):
        count = 0
    if not count:
        raise ValueError(
            f"from_lightning: {name} is a {type(loader).__name__} without a length or without a "
            "batch: give a DataLoader of a data set that has a length and a batch or more; a "
            "sampler or an IterableDataset needs __len__, the number of its samples"
        )


@contextmanager
def seeded(key: int, loaders: Loaders) -> Iterator[None]:
    """Seed Python's and NumPy's random numbers and the loaders' own generators.

    Torch's are seeded for each party.

    Args:
        key: The seed.
        loaders: The loaders of a party.
    """
    with isolate_rng():
        random.seed(key)
        np.random.seed(key % 2**32)
        owners = [*loaders.values()]
        for name in ("sampler", "batch_sampler", "sampler"):
            owners += [getattr(owner, name, None) for owner in owners]
        for owner in owners:
            if getattr(owner, "generator", None) is not None:
                owner.generator.manual_seed(key)
        yield
