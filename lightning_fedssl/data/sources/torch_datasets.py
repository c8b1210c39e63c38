"""Samples from PyTorch data sets, or arrays in a file; read once into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit, check_labels
from lightning_fedssl.data.sources.base import DataSource, LoadedData, measure, number_clients

_READ_TWICE = 3
"""Samples of each data set that are read a second time, to refuse random transforms."""

_MOST_CLASSES = 100_000
"""With more classes than this and than samples, the labels are taken to be other numbers, such as dates."""


class Datasets(DataSource):
    """Map-style PyTorch data sets that give ``(sample, label)``; read once into memory.

    8-bit samples of three dimensions are images; 16-bit images are scaled by their range to 0..1; other numbers are
    taken as they are. They are normalised by mean and standard deviation of the training samples, per first dimension
    (feature or channel), computed from at most 10,000 samples, evenly spread.

    A data set must give the same sample at every reading: ``weak`` and ``strong`` are the place for random transforms.

    Args:
        train: Training samples and labels.
        test: Test samples and labels.
        unlabeled: Samples without labels, which only clients get. It gives samples alone, or pairs whose second part is
            not used.
        validation: Validation samples and labels; used in place of the fraction ``data.validation``.
        client_ids: For every training sample the identifier of its client, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`; if left out, the training data set's
            attribute ``client_ids``.
        test_client_ids: For every test sample the identifier of its client, None for none; if left out, the attribute
            of ``test``. A warning names identifiers that no training sample has.
        unlabeled_client_ids: For every sample without a label the identifier of its client; likewise.
        class_names: Names of the classes in the order of the labels; if left out, the data set's attribute
            ``classes``, else the classes are numbered up to the largest training label.

    Raises:
        ValueError: If samples differ in shape, hold NaN, or do not fit labels or identifiers; the message names which.
    """

    # Dataset and not Dataset[Any]: for that, jsonargparse accepts no arguments of the class that is given.
    def __init__(
        self,
        train: Dataset,  # type: ignore[type-arg]
        test: Dataset,  # type: ignore[type-arg]
        unlabeled: Dataset | None = None,  # type: ignore[type-arg]
        validation: Dataset | None = None,  # type: ignore[type-arg]
        client_ids: Sequence[Any] | None = None,
        test_client_ids: Sequence[Any] | None = None,
        unlabeled_client_ids: Sequence[Any] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.train = train
        self.test = test
        self.unlabeled = unlabeled
        self.validation = validation
        self.client_ids = _or_attribute(client_ids, train)
        self.test_client_ids = _or_attribute(test_client_ids, test)
        self.unlabeled_client_ids = _or_attribute(unlabeled_client_ids, unlabeled)
        self.class_names = class_names
        self._loaded: LoadedData | None = None

    def load(self) -> LoadedData:
        """Reads every sample once; see the base class."""
        self._loaded = self._loaded or self._read()
        return self._loaded

    def _read(self) -> LoadedData:
        if missing := [name for name in ("train", "test") if self._parts()[name] is None]:
            raise ValueError(f"data.dataset: {missing[0]} is missing; give it samples with labels")
        parts = {name: _read(name, data) for name, data in self._parts().items() if data is not None}
        values, labels = parts["train"]
        for name, (others, _) in parts.items():
            _check_alike(values, others, name)
        names = tuple(map(str, self.class_names or getattr(self.train, "classes", ()) or _numbered_classes(labels)))
        mean, std = measure(values)
        spec = DatasetSpec(
            type(self).__name__, len(names), tuple(values.shape[1:]), mean, std, names,
            pixels=values.dtype == torch.uint8, usual_views=False,
        )  # fmt: skip
        labeled = {
            name: (x, check_labels(y, len(names), name)) for name, (x, y) in parts.items() if name != "unlabeled"
        }
        owners, test_owners = self._number_clients({name: len(part[1]) for name, part in parts.items()})
        train = _join(labeled["train"], parts.get("unlabeled"))
        validation = ImageSplit(*labeled["validation"]) if "validation" in labeled else None
        return LoadedData(spec, ImageSplit(*train, owners), ImageSplit(*labeled["test"], test_owners), validation)

    def _parts(self) -> dict[str, Dataset[Any] | None]:
        return {"train": self.train, "test": self.test, "unlabeled": self.unlabeled, "validation": self.validation}

    def _number_clients(self, sizes: dict[str, int]) -> list[Tensor | None]:
        """The clients' numbers of the training samples, those without labels among them, and of the test samples."""
        extra = sizes.get("unlabeled", 0)
        given = (
            ("client_ids", self.client_ids, sizes["train"]), ("test_client_ids", self.test_client_ids, sizes["test"]),
            ("unlabeled_client_ids", self.unlabeled_client_ids, extra),
        )  # fmt: skip
        for part, ids, count in given:
            if ids is not None and len(ids) != count:
                raise ValueError(f"data.dataset: {len(ids)} {part} for {count} samples; give one for each")
        ids = self.client_ids
        if ids is not None and extra:
            if self.unlabeled_client_ids is None:
                raise ValueError("data.dataset: client_ids with unlabeled samples need unlabeled_client_ids as well")
            ids = [*ids, *self.unlabeled_client_ids]
        elif ids is None and self.unlabeled_client_ids is not None:
            raise ValueError("data.dataset: unlabeled_client_ids need client_ids of the training samples as well")
        return number_clients(ids, self.test_client_ids)


_ARRAYS = ("train", "train_labels", "test", "test_labels")
_OPTIONAL_ARRAYS = (
    "unlabeled", "validation", "validation_labels", "client_ids", "test_client_ids", "unlabeled_client_ids",
)  # fmt: skip


class Arrays(DataSource):
    """Arrays in a NumPy file (``numpy.savez``): tables, signals or images without a class of your own.

    The file holds ``train``, ``train_labels``, ``test``, ``test_labels`` and, if wanted, ``unlabeled``, ``validation``,
    ``validation_labels``, ``client_ids``, ``test_client_ids``, ``unlabeled_client_ids``; see :class:`Datasets`.

    Args:
        path: The ``.npz`` file.
        class_names: Names of the classes in the order of the labels.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not readable, or an array is missing or unknown; the message names it.
    """

    def __init__(self, path: str, class_names: Sequence[str] | None = None) -> None:
        self.path = path
        self.class_names = class_names
        self._datasets: Datasets | None = None

    def load(self) -> LoadedData:
        """Reads the file; see the base class."""
        self._datasets = self._datasets or self._make(_read_arrays(self.path))
        return self._datasets.load()

    def _make(self, arrays: dict[str, Any]) -> Datasets:
        ids = {name: arrays.get(name) for name in ("client_ids", "test_client_ids", "unlabeled_client_ids")}
        return Datasets(
            as_dataset((arrays["train"], arrays["train_labels"])),
            as_dataset((arrays["test"], arrays["test_labels"])),
            as_dataset((arrays["unlabeled"],)) if "unlabeled" in arrays else None,
            as_dataset((arrays["validation"], arrays["validation_labels"])) if "validation" in arrays else None,
            class_names=self.class_names,
            **ids,
        )


def as_dataset(data: Dataset[Any] | Sequence[Any]) -> Dataset[Any]:
    """A data set, from a data set or a tuple of arrays or tensors.

    Args:
        data: A data set, ``(samples, labels)`` or ``(samples,)``.
    """
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        try:
            tensors = [torch.as_tensor(part) for part in data]
            counts = [len(part) for part in tensors]
        except TypeError as error:  # text, Python objects, or a single number
            found = " and ".join(f"{part.dtype} {tuple(part.shape)}" for part in data)
            raise ValueError(
                f"data.dataset: the arrays are {found}; give numbers, one row for each sample. Labels are class "
                "numbers 0, 1, ..., and class_names has their names"
            ) from error
        if len(set(counts)) > 1:
            raise ValueError(f"data.dataset: {counts[0]} samples and {counts[1]} labels; give one for each")
        return TensorDataset(*tensors)
    return data  # type: ignore[return-value]


def load_arrays(path: str, key: str) -> dict[str, Any]:
    """The arrays in a file of ``numpy.savez`` by name.

    Args:
        path: The ``.npz`` file.
        key: The key or the meaning of the path, for the messages.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not readable, or holds Python objects.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{key}: the file {path!r} does not exist")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"{key}: {path!r} is no readable file of numpy.savez with arrays of numbers; write it with numpy.savez, "
            "labels as class numbers 0, 1, ..."
        ) from error


def _read_arrays(path: str) -> dict[str, Any]:
    arrays = load_arrays(path, "data.dataset")
    missing = [name for name in _ARRAYS if name not in arrays]
    if "validation" in arrays and "validation_labels" not in arrays:
        missing.append("validation_labels")
    unknown = [name for name in arrays if name not in (*_ARRAYS, *_OPTIONAL_ARRAYS)]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown arrays {', '.join(unknown)}"
        known = ", ".join((*_ARRAYS, *_OPTIONAL_ARRAYS))
        raise ValueError(f"data.dataset: {path!r} {what}; Arrays reads {known}")
    return arrays


def _numbered_classes(labels: Tensor) -> range:
    """The classes from 0 to the largest label."""
    largest = int(labels.max())
    if largest >= max(len(labels), _MOST_CLASSES):
        raise ValueError(
            f"data.dataset: the largest of {len(labels)} training labels is {largest}; number the classes from 0, or "
            "give class_names"
        )
    return range(largest + 1)


def _or_attribute(ids: Sequence[Any] | None, dataset: Dataset[Any] | None) -> Sequence[Any] | None:
    return getattr(dataset, "client_ids", None) if ids is None else ids


def _check_alike(values: Tensor, others: Tensor, part: str) -> None:
    if values.shape[1:] != others.shape[1:] or values.dtype != others.dtype:
        raise ValueError(
            f"data.dataset: training samples are {tuple(values.shape[1:])} {values.dtype}, {part} samples "
            f"{tuple(others.shape[1:])} {others.dtype}; give both in the same shape and type"
        )


def _join(train: tuple[Tensor, Tensor], unlabeled: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Training samples, then those without labels, which have the label -1."""
    return train if unlabeled is None else (torch.cat([train[0], unlabeled[0]]), torch.cat([train[1], unlabeled[1]]))


def _read(part: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """The samples and labels of a data set; of ``unlabeled`` all labels are -1."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(f"data.dataset: {part} is {type(dataset).__name__}; give a data set with a length, or tensors")
    if not len(dataset):
        raise ValueError(f"data.dataset: {part} has no sample")
    whole = isinstance(dataset, TensorDataset) and len(dataset.tensors) in ((1, 2) if part == "unlabeled" else (2,))
    samples, labels = _columns(dataset) if whole else _read_items(part, dataset)  # type: ignore[arg-type]
    labels = torch.full((len(samples),), -1) if part == "unlabeled" else _as_labels(labels, part)
    return as_values(samples, part), labels


def _columns(dataset: TensorDataset) -> tuple[Tensor, Tensor]:
    return dataset.tensors[0], dataset.tensors[-1]


def _read_items(part: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Reads item by item into one tensor; the first samples are read twice."""
    first, _ = _pair(part, 0, dataset[0])
    count = len(dataset)  # type: ignore[arg-type]
    samples, labels = torch.empty((count, *first.shape), dtype=first.dtype), torch.zeros(count, dtype=torch.float64)
    for i in range(count):
        sample, label = _pair(part, i, dataset[i])
        if sample.shape != first.shape or sample.dtype != first.dtype:
            raise ValueError(
                f"data.dataset: {part} samples must have one shape and type; sample 0 is {tuple(first.shape)} "
                f"{first.dtype}, sample {i} {tuple(sample.shape)} {sample.dtype}"
            )
        samples[i], labels[i] = sample, label
    for i in range(min(_READ_TWICE, count)):
        again = _pair(part, i, dataset[i])[0]
        if not torch.equal(again.double().nan_to_num(), samples[i].double().nan_to_num()):
            raise ValueError(
                f"data.dataset: {part}[{i}] differs between two readings; remove random transforms from the data set "
                "(data.weak and data.strong take them)"
            )
    return samples, labels


def _pair(part: str, index: int, item: Any) -> tuple[Tensor, float]:
    if part == "unlabeled":
        item = (item[0], -1) if isinstance(item, (tuple, list)) and item else (item, -1)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ValueError(f"data.dataset: {part}[{index}] must be (sample, label), got {_describe(item)}")
    sample, label = item
    if not isinstance(sample, (Tensor, np.ndarray)):
        raise ValueError(
            f"data.dataset: the sample {part}[{index}] is {type(sample).__name__}; give a tensor or an array "
            "(for pictures: torchvision.transforms.v2.functional.pil_to_tensor)"
        )
    try:
        return torch.as_tensor(sample), float(label)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"data.dataset: the label of {part}[{index}] is {label!r}; give the number of a class, from 0"
        ) from error


def _describe(item: Any) -> str:
    """What an item is; for a row with named columns, what to do."""
    if isinstance(item, dict):
        return f"a dict with {', '.join(map(str, item))}; wrap the data set in Columns(dataset, sample=..., label=...)"
    return type(item).__name__


def _as_labels(labels: Tensor, part: str) -> Tensor:
    if labels.ndim != 1 or not torch.equal(labels.double(), labels.double().round()):  # 0.5 or NaN is no class
        raise ValueError(
            f"data.dataset: {part} labels must be one class number from 0 for each sample, got "
            f"{tuple(labels.shape)} {labels.dtype}"
        )
    return labels.long()


def as_values(samples: Tensor, part: str, place: str = "data.dataset") -> Tensor:
    """8-bit images as they are, 16-bit images scaled to 0..1, all else as finite float32 numbers.

    Args:
        samples: One sample for each entry of the first dimension.
        part: What a message calls the samples: ``train``, for example.
        place: The key or the file that a message begins with.

    Raises:
        ValueError: If samples are complex, single numbers or not finite, or images of another type of integers.
    """
    if samples.is_complex():
        raise ValueError(
            f"{place}: {part} samples are complex numbers; give real and imaginary parts as channels, such as "
            "torch.stack([x.real, x.imag], dim=1)"
        )
    if samples.ndim < 2:
        raise ValueError(f"{place}: {part} samples are single numbers; a table's row has shape (features,)")
    if samples.ndim == 3 and samples.dtype == torch.uint8:
        raise ValueError(
            f"{place}: {part} samples are 8-bit numbers of shape {tuple(samples.shape[1:])}; grey images need a "
            "channel: x[:, None]; for signals give x.astype('float32'), in PyTorch x.float()"
        )
    if samples.ndim == 4 and not samples.is_floating_point():
        if samples.dtype == torch.uint8:
            return samples
        if samples.dtype != torch.uint16:
            raise ValueError(
                f"{place}: {part} images of {samples.dtype} have no fixed range; give uint8, uint16 or float"
            )
        return samples.float() / 65535
    values = samples.float()
    finite = values.isfinite().flatten(1).all(dim=1)
    if not finite.all():
        raise ValueError(
            f"{place}: {int((~finite).sum())} of {len(values)} {part} samples hold NaN or infinite values (the "
            f"first is sample {int((~finite).nonzero()[0])}) in float32; repair or remove them"
        )
    return values
