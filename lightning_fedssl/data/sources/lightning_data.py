"""Samples from a Lightning data module; this file imports Lightning only where such a module is read."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

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
        datamodule: The data module; its loaders' batch size and order are not used. Without a validation loader,
            ``data.validation`` holds out training samples.
        class_names: As in :class:`Datasets`.

    Raises:
        ValueError: If the data module has no training or test loader of a map-style data set.
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
            validation = self._dataset("val_dataloader") if self._has("val_dataloader") else None
            self._datasets = Datasets(
                self._dataset("train_dataloader"), self._dataset("test_dataloader"),
                validation=validation, class_names=self.class_names,
            )  # fmt: skip
        return self._datasets.load()

    def _has(self, loader: str) -> bool:
        from lightning.pytorch import LightningDataModule
        from lightning.pytorch.utilities.model_helpers import is_overridden

        return is_overridden(loader, self.datamodule, LightningDataModule)

    def _dataset(self, loader: str) -> Dataset[Any]:
        name = f"data.dataset: {type(self.datamodule).__name__}.{loader}"
        if not self._has(loader):
            raise ValueError(f"{name} is missing; training and test samples are read from the data module's loaders")
        dataset = getattr(getattr(self.datamodule, loader)(), "dataset", None)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ValueError(f"{name} must give one DataLoader of a map-style data set of (sample, label)")
        return dataset  # type: ignore[return-value]
