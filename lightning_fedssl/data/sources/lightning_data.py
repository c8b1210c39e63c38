"""Samples from a Lightning data module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset

from lightning_fedssl.data.sources.arrays import Datasets


class FromLightning(Datasets):
    """The data sets of a Lightning data module: those of its training, validation and test loader.

    Args:
        datamodule: The data module; its loaders' batch size, order and ``collate_fn`` are not used.
            The samples are those that a loader's sampler draws, in ascending order. Without a
            validation loader, ``data.validation`` holds out training samples.
        class_names: As in :class:`Datasets`.

    Raises:
        ValueError: If the data module has no training or test loader of a map-style data set, or a
            sampler draws samples repeatedly; the message names the loader.
    """

    def __init__(
        self, datamodule: LightningDataModule, class_names: Sequence[str] | None = None
    ) -> None:
        datamodule.prepare_data()
        datamodule.setup("fit")
        datamodule.setup("test")
        train = _samples(datamodule, "train")
        test = _samples(datamodule, "test")
        validation = _samples(datamodule, "val")
        super().__init__(train, test, validation=validation, class_names=class_names)


def _samples(datamodule: LightningDataModule, part: str) -> Any:
    """The samples that a loader draws; None if there is no validation loader."""
    source = f"data.dataset: {type(datamodule).__name__}.{part}_dataloader"
    try:
        loader = getattr(datamodule, f"{part}_dataloader")()
    except MisconfigurationException:  # the function is not overridden
        loader = None
    if part == "val" and (loader is None or loader == []):
        return None
    dataset: Any = getattr(loader, "dataset", None)
    if not (
        isinstance(loader, DataLoader)
        and hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
    ):
        raise ValueError(
            f"{source} must give one DataLoader of a map-style data set of (sample, label)"
        )
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    if isinstance(sampler, DistributedSampler):
        return dataset
    indices: list[int] = []
    with torch.random.fork_rng(devices=[]):
        for of_batch in sampler:
            indices += of_batch if isinstance(of_batch, (list, tuple)) else [of_batch]
    if len(set(indices)) < len(indices):
        raise ValueError(
            f"{source} draws samples repeatedly; give them as a data set, without a sampler"
        )
    return dataset if len(indices) == len(dataset) else _Part(dataset, sorted(map(int, indices)))


class _Part(Subset[Any]):
    """Some samples of a data set, with the names of their clients."""

    def __init__(self, dataset: Dataset[Any], indices: list[int]) -> None:
        super().__init__(dataset, indices)
        clients = getattr(dataset, "client_ids", None)
        self.client_ids = None if clients is None else [clients[i] for i in indices]
