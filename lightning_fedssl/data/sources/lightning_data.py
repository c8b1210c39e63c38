"""Samples from a Lightning data module; this file imports Lightning only where such a module is read."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
    default_convert,
)

from lightning_fedssl.data.sources.base import DataSource, LoadedData
from lightning_fedssl.data.sources.torch_datasets import Datasets

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule

    LightningData = LightningDataModule
else:

    class LightningData(ABC):  # noqa: B024 -- it is there for isinstance alone
        """Every Lightning data module is one, without an import of Lightning, which takes seconds.

        As long as nobody has imported Lightning, no object can be one of its data modules.
        """

        @classmethod
        def __subclasshook__(cls, candidate: type) -> bool:
            lightning = sys.modules.get("lightning.pytorch")
            return lightning is not None and issubclass(candidate, lightning.LightningDataModule)


class FromLightning(DataSource):
    """The data sets of a Lightning data module: those of its training, validation and test loader.

    Args:
        datamodule: The data module; its loaders' batch size, order and ``collate_fn`` are not used. Of a loader with a
            ``SubsetRandomSampler`` the samples of its indices are taken, in ascending order. Without a validation
            loader (``val_dataloader`` is missing, or gives None or an empty list), ``data.validation`` holds out
            training samples.
        class_names: As in :class:`Datasets`.

    Raises:
        ValueError: If the data module has no training or test loader of a map-style data set, or it is not known which
            samples a loader's sampler draws; the message names the loader.
    """

    def __init__(self, datamodule: LightningData, class_names: Sequence[str] | None = None) -> None:
        self.datamodule = datamodule
        self.class_names = class_names
        self._datasets: Datasets | None = None

    def load(self) -> LoadedData:
        """Prepares and sets up the data module, and reads its data sets; see the base class."""
        if self._datasets is None:
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            self.datamodule.setup("test")
            loaders = self._loaders()
            self._warn_of_collate(loaders)
            found = {name: _samples(loader, f"{self._who()}.{name}") for name, loader in loaders.items()}
            self._datasets = Datasets(
                found["train_dataloader"], found["test_dataloader"],
                validation=found.get("val_dataloader"), class_names=self.class_names,
            )  # fmt: skip
        return self._datasets.load()

    def _loaders(self) -> dict[str, DataLoader[Any]]:
        """The loaders by the names of their functions; without that of the validation if there is none."""
        found = {name: self._call(name) for name in ("train_dataloader", "test_dataloader", "val_dataloader")}
        if found["val_dataloader"] is None:
            del found["val_dataloader"]
        for name, loader in found.items():
            _check_loader(loader, f"{self._who()}.{name}")
        return found

    def _call(self, name: str) -> Any:
        """What a function of the data module gives; None if there is no such function, or it gives an empty list."""
        from lightning.pytorch import LightningDataModule
        from lightning.pytorch.utilities.model_helpers import is_overridden

        if not is_overridden(name, self.datamodule, LightningDataModule):
            return None
        loader = getattr(self.datamodule, name)()
        return None if isinstance(loader, (list, tuple)) and not loader else loader

    def _who(self) -> str:
        return f"data.dataset: {type(self.datamodule).__name__}"

    def _warn_of_collate(self, loaders: dict[str, DataLoader[Any]]) -> None:
        own = [name for name, loader in loaders.items() if loader.collate_fn not in (default_collate, default_convert)]
        if own:
            from lightning.pytorch.utilities import rank_zero_warn  # imported late: it takes seconds

            rank_zero_warn(
                f"{self._who()}: the collate_fn of {', '.join(own)} is not used, because samples are read one by one; "
                "do its work in the data set"
            )


class _Part(Subset[Any]):
    """Some samples of a data set, with the names of its classes and their clients."""

    def __init__(self, dataset: Dataset[Any], indices: list[int]) -> None:
        super().__init__(dataset, indices)
        clients = getattr(dataset, "client_ids", None)
        self.client_ids = None if clients is None else [clients[i] for i in indices]
        self.classes = getattr(dataset, "classes", ())


def _check_loader(loader: object, name: str) -> None:
    if loader is None:
        raise ValueError(
            f"{name} is missing or gives no loader; training and test samples are read from the data module's loaders"
        )
    dataset = getattr(loader, "dataset", None)
    if not (isinstance(loader, DataLoader) and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(f"{name} must give one DataLoader of a map-style data set of (sample, label)")


def _samples(loader: DataLoader[Any], name: str) -> Dataset[Any]:
    """The samples that a loader's sampler draws."""
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler if batches is None else batches
    if type(sampler) is SubsetRandomSampler:
        return _Part(loader.dataset, sorted(map(int, sampler.indices)))
    if not _draws_each_once(sampler, len(loader.dataset)):  # type: ignore[arg-type]
        raise ValueError(
            f"{name} has a {type(sampler).__name__} that may not draw every sample once; give the samples to draw as "
            "torch.utils.data.Subset(dataset, indices), without a sampler"
        )
    return loader.dataset


def _draws_each_once(sampler: object, count: int) -> bool:
    """Whether a sampler draws each of ``count`` samples once; exact types, because a subclass may draw others."""
    if type(sampler) is DistributedSampler:
        return len(sampler.dataset) == count  # type: ignore[arg-type]
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == count
    return type(sampler) is SequentialSampler and len(sampler) == count
