"""Data sets of the Hugging Face library ``datasets``, which the extra ``huggingface`` installs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedssl.data.image_files import RESAMPLING
from lightning_fedssl.data.sources.base import DataSource, LoadedData
from lightning_fedssl.data.sources.torch_datasets import Datasets

_CONVERTED = {"P": "RGB", "1": "L"}
"""Pillow's modes whose stored values are no brightness, numbers of a palette and bits, and the modes to use instead."""


class Columns(Dataset[Any]):
    """Rows with named columns as pairs ``(sample, label)``: Hugging Face data sets, lists of dicts.

    A picture becomes uint8 ``(channels, height, width)``; lists and arrays become tensors.

    Args:
        rows: What gives a dict at an index, with a length.
        sample: Column of the samples.
        label: Column of the labels; None for rows without labels.
        image_size: Side in pixels to which pictures are resized and cropped; None leaves them as they are.

    Raises:
        ValueError: If there is no row, or a column is missing; the message names the columns that there are.
    """

    def __init__(self, rows: Any, sample: str = "image", label: str | None = "label", image_size: int | None = None):
        if not len(rows):
            raise ValueError("data.dataset: there is no row")
        found = list(rows[0])
        if missing := [column for column in (sample, label) if column is not None and column not in found]:
            raise ValueError(
                f"data.dataset: there is no column {', '.join(map(repr, missing))}; there are {', '.join(found)}"
            )
        self.rows = rows
        self.sample = sample
        self.label = label
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """``(sample, label)``; -1 for rows without labels."""
        row = self.rows[index]
        return self._tensor(row[self.sample]), -1 if self.label is None else row[self.label]

    def _tensor(self, value: Any) -> Tensor:
        if not hasattr(value, "getbands"):  # no Pillow image
            return torch.as_tensor(np.asarray(value))
        if value.mode in _CONVERTED:
            value = value.convert(_CONVERTED[value.mode])
        if self.image_size is not None:
            from PIL import Image, ImageOps

            value = ImageOps.fit(value, (self.image_size, self.image_size), Image.Resampling[RESAMPLING])
        pixels = np.array(value)
        return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


class HuggingFace(DataSource):
    """A data set of Hugging Face's library ``datasets`` (the extra ``huggingface``), read once into memory.

    Args:
        path: What ``datasets.load_dataset`` takes: a name on the Hub, or a local folder; a folder that
            ``save_to_disk`` wrote is read, too.
        name: The configuration of the data set, if it has several.
        sample_column: Column of the samples: pictures, or numbers of one shape.
        label_column: Column of the labels; its class names are used if it has some.
        train_split: Split of the training samples.
        test_split: Split of the test samples.
        unlabeled_split: Split of samples that only clients get; its labels are not read.
        validation_split: Split of the validation samples.
        client_column: Column of the clients' identifiers.
        image_size: Side in pixels to which pictures are resized and cropped; None if all have one size.

    Raises:
        ModuleNotFoundError: If the library is not installed; the message names the extra.
        ValueError: If a split or a column is missing; the message names those that there are.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        sample_column: str = "image",
        label_column: str = "label",
        train_split: str = "train",
        test_split: str = "test",
        unlabeled_split: str | None = None,
        validation_split: str | None = None,
        client_column: str | None = None,
        image_size: int | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self.sample_column = sample_column
        self.label_column = label_column
        self.splits = {
            "train": train_split, "test": test_split, "unlabeled": unlabeled_split, "validation": validation_split
        }  # fmt: skip
        self.client_column = client_column
        self.image_size = image_size
        self._datasets: Datasets | None = None

    def load(self) -> LoadedData:
        """Reads the splits; see the base class."""
        self._datasets = self._datasets or self._make(_open(self.path, self.name))
        return self._datasets.load()

    def _make(self, found: Any) -> Datasets:
        rows = {part: self._split(found, split) for part, split in self.splits.items() if split is not None}
        samples: dict[str, Dataset[Any]] = {
            part: Columns(
                split, self.sample_column, None if part == "unlabeled" else self.label_column, self.image_size
            )
            for part, split in rows.items()
        }
        ids = {
            key: self._clients(rows[part])
            for part, key in (
                ("train", "client_ids"),
                ("test", "test_client_ids"),
                ("unlabeled", "unlabeled_client_ids"),
            )
            if self.client_column is not None and part in rows
        }
        classes = getattr(rows["train"].features.get(self.label_column), "names", None)
        return Datasets(**samples, **ids, class_names=classes)  # type: ignore[arg-type]

    def _split(self, found: Any, split: str) -> Any:
        if split not in found:
            raise ValueError(f"data.dataset: {self.path!r} has no split {split!r}; there are {', '.join(found)}")
        return found[split]

    def _clients(self, rows: Any) -> Sequence[Any]:
        if self.client_column not in rows.column_names:
            raise ValueError(
                f"data.dataset: {self.path!r} has no column {self.client_column!r} (client_column); there are "
                f"{', '.join(rows.column_names)}"
            )
        return list(rows[self.client_column])


def _open(path: str, name: str | None) -> Any:
    """All splits of a data set by their names."""
    try:
        library = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ModuleNotFoundError(
            "data.dataset: HuggingFace needs the library datasets; install it, in a checkout of this package: "
            'pip install ".[huggingface]"'
        ) from error
    if Path(path, "dataset_dict.json").is_file():
        return library.load_from_disk(path)
    try:
        return library.load_dataset(path, name)
    except (OSError, ValueError) as error:  # the library's own errors are subclasses of these
        raise ValueError(
            f"data.dataset: {path!r} cannot be loaded from the Hugging Face Hub or disk: {error}"
        ) from error
