"""Samples from PyTorch data sets, or arrays in a file; read once into memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit, shortened
from lightning_fedssl.data.sources.base import (
    DataSource,
    LoadedData,
    check_finite,
    measure,
    number_clients,
)
from lightning_fedssl.data.sources.reading import NO_LABEL

_READ_TWICE = 100
"""Samples of each data set that are read a second time, to refuse random transforms."""

_ROUNDED = 1e-3
"""The largest part of an 8-bit step that is an error of rounding."""

_FEWEST_STEPS = 8
"""Of numbers from 0 to 1 that 8 bits would change, half have at least so many steps in an image."""

_REMEDY = (
    "rows with named columns are wrapped in Columns(rows, sample=..., label=...), pictures become "
    "tensors by torchvision.transforms.v2.functional.pil_to_tensor"
)


class Datasets(DataSource):
    """Map-style PyTorch data sets that give ``(sample, label)``; read once into memory.

    Samples ``(1 or 3, height, width)`` are images of 8 bits, also if all parts hold whole numbers
    from 0 to 255 or numbers from 0 to 1 of another type, unless 8 bits would make most of these
    almost zero, as of spectrograms with a few peaks; so are 8-bit samples of other channels.
    Other 16-bit images are scaled by their range to 0..1, other numbers are taken as they are. They
    are normalised by mean and standard deviation of the
    training samples and those without labels, per first dimension (feature or channel), computed
    from at most 10,000 samples, evenly spread. The labels None, NaN and -1 stand for none.

    A data set must give the same sample at every reading: ``weak`` and ``strong`` are the place for
    random transforms.

    Args:
        train: Training samples and labels.
        test: Test samples and labels.
        unlabeled: Samples without labels, which only clients get. It gives samples alone, or pairs
            whose second part is not used.
        validation: Validation samples and labels; used in place of the fraction
            ``data.validation``.
        client_ids: For every training sample the identifier of its client, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`; if left out, the
            training data set's attribute ``client_ids``. Not needed where all labelled samples are
            the server's.
        test_client_ids: For every test sample the identifier of its client, None for none; if left
            out, the attribute of ``test``. A warning names identifiers that no training sample has.
        unlabeled_client_ids: For every sample without a label the identifier of its client;
            likewise.
        class_names: Names of the classes in the order of the labels; if left out, the data set's
            attribute ``classes``, else the classes are numbered up to the largest training label.

    Raises:
        ValueError: If samples differ in shape, hold NaN, or do not fit labels or identifiers, or
            the data sets number other classes; the message names which.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> samples = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
        >>> Datasets(samples, samples, class_names=["no", "yes"]).load().spec.in_shape
        (3,)
    """

    feature_names: Sequence[str] = ()
    fitted: tuple[str, ...] = ()

    # Dataset and not Dataset[Any]: for that, jsonargparse accepts no arguments of the class that is
    # given.
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
        self.parts = {
            "train": as_dataset(train),
            "test": as_dataset(test),
            "unlabeled": as_dataset(unlabeled),
            "validation": as_dataset(validation),
        }
        identifiers = {
            "train": client_ids,
            "test": test_client_ids,
            "unlabeled": unlabeled_client_ids,
        }
        self.ids = {
            p: getattr(self.parts[p], "client_ids", None) if ids is None else ids
            for p, ids in identifiers.items()
        }
        names = max(class_lists(train), key=len, default=[])
        self.class_names = names if class_names is None else list(class_names)
        self._loaded: LoadedData | None = None

    def load(self) -> LoadedData:
        """Read every sample once; later calls return the same."""
        self._loaded = self._loaded or self._read()
        return self._loaded

    def _read(self) -> LoadedData:
        self._compare_classes()
        samples = {}
        labels = {}
        for part, dataset in self.parts.items():
            if dataset is not None:
                samples[part], targets = _read(part, dataset)
                labels[part] = self.task.clean_targets(targets)
        samples = self.reading.cast(as_pixels(samples), self.feature_names)
        expected = _kind(samples["train"])
        for part, values in samples.items():
            if _kind(values) != expected:
                raise ValueError(
                    f"data.dataset: {part} samples are {_kind(values)}, training samples "
                    f"{expected}; give both in one shape and type"
                )
        names = tuple(map(str, self.class_names or range(self.task.count(labels["train"]))))
        if "unlabeled" in samples:
            labels["unlabeled"] = self.task.missing(len(samples["unlabeled"]), labels["train"])
        numbers = {
            part: self.task.checked(y, len(names), f"data.dataset: {part}", allow_missing=True)
            for part, y in labels.items()
        }
        if not self.class_names and "one class" in self.task.gives:
            self.reading.warn_of_classes(names, numbers["train"])
        clients, test_clients, client_names = number_clients(self._training_ids(), self.ids["test"])
        if (
            clients is not None and self.ids["train"] is None
        ):  # the server's samples belong to no client
            clients = torch.cat([torch.full((len(numbers["train"]),), -1), clients])
        train = [part for part in ("train", "unlabeled") if part in samples]
        x = torch.cat([samples[part] for part in train])
        y = torch.cat([numbers[part] for part in train])
        self._warn_of_layout(tuple(x.shape[1:]))
        spec = DatasetSpec(
            type(self).__name__, len(names), tuple(x.shape[1:]), *measure(x), names,
            pixels=x.dtype == torch.uint8, usual_views=False, client_names=client_names,
            fitted=self.fitted,
        )  # fmt: skip
        validation = None
        if "validation" in samples:
            validation = ImageSplit(samples["validation"], numbers["validation"])
        test = ImageSplit(samples["test"], numbers["test"], test_clients)
        return LoadedData(spec, ImageSplit(x, y, clients), test, validation)

    def _warn_of_layout(self, shape: tuple[int, ...]) -> None:
        """Names samples that may be images in another layout."""
        if len(shape) in (2, 3) and shape[-2] == shape[0] >= max(8, shape[-1]):
            self.reading.warn(
                f"samples of shape {shape} have {shape[0]} channels, which come first: x[:, None] "
                "for grey images, x.transpose(1, 2) for signals, x.permute(0, 3, 1, 2) for others"
            )

    def _training_ids(self) -> list[Any] | None:
        """The identifiers of labelled samples, if they have some, then of those without labels."""
        labeled = self.ids["train"]
        unlabeled = self.ids["unlabeled"]
        if self.parts["unlabeled"] is not None and labeled is not None and unlabeled is None:
            raise ValueError(
                "data.dataset: give client_ids and unlabeled_client_ids, or none of them"
            )
        if labeled is None and unlabeled is None:
            return None
        return [*(() if labeled is None else labeled), *(() if unlabeled is None else unlabeled)]

    def _compare_classes(self) -> None:
        """Refuses data sets that number their classes in another way than the training data set."""
        expected = max(class_lists(self.parts["train"]), key=len, default=[])
        for part in ("train", "test", "validation"):
            for names in class_lists(self.parts[part]):
                if expected and names != expected[: len(names)]:
                    raise ValueError(
                        f"data.dataset: classes of {part} are {shortened(', '.join(names))}, and "
                        f"those of train {shortened(', '.join(expected))}: labels must number the "
                        "same classes, in every part of a ConcatDataset, too"
                    )


class Arrays(Datasets):
    """Arrays in a NumPy file (``numpy.savez``): tables, signals or images without a class of your
    own.

    The file holds ``train``, ``train_labels``, ``test``, ``test_labels`` and, if wanted,
    ``unlabeled``, ``validation``, ``validation_labels``, ``client_ids``, ``test_client_ids``,
    ``unlabeled_client_ids``; see :class:`Datasets`.

    Args:
        path: The ``.npz`` file.
        class_names: Names of the classes in the order of the labels.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not readable, or an array is missing or unknown; the message
            names it.
    """

    def __init__(self, path: str, class_names: Sequence[str] | None = None) -> None:
        arrays = load_arrays(path, "data.dataset")
        names = ("client_ids", "test_client_ids", "unlabeled_client_ids")
        ids = {name: arrays.pop(name, None) for name in names}
        extra = {"unlabeled", "validation", "validation_labels"} & arrays.keys()
        needed = {"train", "train_labels", "test", "test_labels"} | extra
        if arrays.keys() != needed or ("validation" in extra) != ("validation_labels" in extra):
            raise ValueError(
                f"data.dataset: {path!r} has {', '.join(arrays)}; Arrays reads train, "
                "train_labels, test, test_labels, unlabeled, validation, validation_labels, "
                f"{', '.join(ids)}"
            )
        parts: dict[str, Any] = {}
        for part in ("train", "test", *extra - {"validation_labels"}):
            parts[part] = [arrays[part]]
            if f"{part}_labels" in arrays:
                parts[part].append(arrays[f"{part}_labels"])
        super().__init__(**parts, **ids, class_names=class_names)


def as_dataset(data: Any) -> Any:
    """A data set, from a data set or a tuple of arrays or tensors.

    Args:
        data: A data set, ``(samples, labels)``, ``(samples,)`` or None; the labels may be a list.
    """
    match data:
        case Tensor() | np.ndarray() as samples, list() as labels:
            data = samples, np.array(labels)
    if not isinstance(data, (tuple, list)) or not all(
        isinstance(part, (Tensor, np.ndarray)) for part in data
    ):
        return data
    try:
        return TensorDataset(*map(as_tensor, data))
    except (TypeError, AssertionError) as error:  # text or Python objects; or two lengths
        shapes = " and ".join(f"{part.dtype} {tuple(part.shape)}" for part in data)
        raise ValueError(
            f"data.dataset: the arrays are {shapes}; give numbers, one row for each sample, and as "
            "many labels: class numbers 0, 1, ..., of which class_names has the names (names, "
            "numbers = numpy.unique(labels, return_inverse=True) for text)"
        ) from error


def as_tensor(values: Any) -> Tensor:
    """A tensor; PyTorch reads neither other than native bytes nor negative strides."""
    if isinstance(values, np.ndarray):
        values = np.asarray(values, values.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(values).detach()


def class_lists(dataset: Any) -> list[list[str]]:
    """The names of a data set's classes, or of those of its parts; none if unknown.

    Args:
        dataset: A data set, a part of one, or several in one (``Subset``, ``ConcatDataset``).
    """
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Iterable) and (names := [*map(str, classes)]):
        return [names]
    parts = getattr(dataset, "datasets", None)
    lists = []
    for part in parts if isinstance(parts, list) else [getattr(dataset, "dataset", None)]:
        lists += [] if part is None else class_lists(part)
    return lists


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
            f"{key}: {path!r} is not a readable file of numpy.savez with arrays of numbers; write "
            "it with numpy.savez, samples of one length, labels as class numbers 0, 1, ..."
        ) from error


def _read(part: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """The samples and labels of a data set, as they are; those of ``unlabeled`` mean nothing."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
        raise ValueError(
            f"data.dataset: {part} is {type(dataset).__name__}; give a data set with samples, or "
            "tensors"
        )
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) < 3:
        samples = dataset.tensors[0]
        labels = dataset.tensors[-1]
    else:
        samples, labels = _read_items(part, dataset)
    return as_values(samples, part), labels


def _read_items(part: str, dataset: Any) -> tuple[Tensor, Tensor]:
    """Reads item by item; some samples are read twice."""
    samples: list[Tensor] = []
    labels = []
    for number in range(len(dataset)):
        sample, label = _pair(part, number, dataset[number])
        samples.append(sample)
        labels.append(label)
    for number, sample in enumerate(samples):
        if _kind(sample[None]) != _kind(samples[0][None]):
            raise ValueError(
                f"data.dataset: {part} samples must have one shape and type; sample 0 is "
                f"{_kind(samples[0][None])}, sample {number} {_kind(sample[None])}"
            )
    _refuse_random(part, dataset, samples)
    return torch.stack(samples), _stacked(part, labels)


def _kind(samples: Tensor) -> str:
    """Shape and type of a sample, as messages show them."""
    return f"{tuple(samples.shape[1:])} {samples.dtype}"


def _refuse_random(part: str, dataset: Any, samples: list[Tensor]) -> None:
    """Reads samples again: they must be the same, and draw nothing from PyTorch's generator."""
    what = ""
    states = []
    for i in range(0, len(samples), -(-len(samples) // _READ_TWICE)):
        again = _pair(part, i, dataset[i])[0]
        if not np.array_equal(again.numpy(), samples[i].numpy(), equal_nan=True):
            what = what or f"[{i}] differs between two readings"
    for _ in range(2):  # a data set that seeds the generator leaves it in one state
        dataset[0]
        states.append(torch.get_rng_state())
    if what or not torch.equal(*states):
        raise ValueError(
            f"data.dataset: {part}{what or ' draws random numbers'}; remove random transforms from "
            "the data set (data.weak and data.strong take them)"
        )


def _stacked(part: str, labels: list[Tensor]) -> Tensor:
    """The labels of all samples; the single number -1 among others stands for none."""
    shapes = {label.shape for label in labels}
    if len(shapes) > 1:
        shape = max(shapes, key=len)
        labels = [y if y.dim() else y.expand(shape) for y in labels]
    try:
        return torch.stack(labels)
    except RuntimeError as error:
        raise ValueError(f"data.dataset: {part} labels must have one shape: {error}") from error


def _pair(part: str, index: int, item: Any) -> tuple[Tensor, Tensor]:
    """A sample and its label as tensors; the label is -1 for none."""
    where = f"data.dataset: {part}[{index}]"
    if part == "unlabeled":
        item = (item[0] if isinstance(item, (tuple, list)) else item, -1)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        kind = f"{len(item)} values" if isinstance(item, (tuple, list)) else type(item).__name__
        raise ValueError(f"{where} must be (tensor, number of a class), got {kind}; {_REMEDY}")
    value, label = item
    try:
        sample = as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} is {type(value).__name__}, no tensor; {_REMEDY}") from error
    if label is None or (isinstance(label, str) and label in NO_LABEL):
        return sample, torch.tensor(-1.0, dtype=torch.float64)
    try:
        return sample, as_tensor(np.asarray(label)).double()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} has the label {shortened(repr(label))}; give the number of a class: for text "
            "its place in class_names, for one-hot labels label.argmax()"
        ) from error


def as_values(samples: Tensor, part: str, place: str = "data.dataset") -> Tensor:
    """8-bit images as they are, 16-bit images scaled to 0..1, all else as floating numbers.

    Args:
        samples: One sample for each entry of the first dimension.
        part: What a message calls the samples: ``train``, for example.
        place: The key or the file that a message begins with.

    Raises:
        ValueError: If images have another layout, or a sample holds NaN or infinite values.
    """
    shape = tuple(samples.shape[1:])
    dtype = samples.dtype
    samples = samples.detach()
    if not shape or not samples.numel() or dtype.is_complex:
        raise ValueError(
            f"{place}: {part} samples are {dtype} of shape {shape}; give real numbers, x[:, None] "
            "where a sample is one number"
        )
    channels_last = len(shape) == 3 and min(shape[:2]) > shape[2] and shape[2] in (1, 3, 4)
    if channels_last or (dtype == torch.uint8 and len(shape) == 2):
        raise ValueError(
            f"{place}: {part} samples are {dtype} of shape {shape}; images are (channels, height, "
            "width): x[:, None] for grey ones, x.permute(0, 3, 1, 2) where channels come last; "
            "signals are (channels, time) as x.float()"
        )
    if len(shape) == 3 and dtype == torch.uint8:
        return samples
    samples = samples if dtype == torch.float32 else samples.double()
    if len(shape) == 3 and dtype == torch.uint16:
        samples = samples / 65535
    check_finite(samples, f"{place}: {part}")
    return samples


def as_pixels(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, or 8-bit images where all parts hold such in another type.

    Args:
        parts: Samples that :func:`as_values` returned, by the names of the parts.
    """
    scales = {_pixel_scale(samples) for samples in parts.values()}
    if len(scales) > 1 or 0 in scales:
        return parts
    scale = scales.pop()
    return {part: (samples * scale).round().byte() for part, samples in parts.items()}


def _pixel_scale(samples: Tensor) -> int:
    """The factor that turns the values of images into 8-bit pixels; 0 for other samples."""
    if samples.dim() != 4 or samples.shape[1] not in (1, 3):
        return 0
    low, high = samples.aminmax()
    if low < 0 or high > 255 or high < 0.25:  # dark numbers would become few values
        return 0
    if high <= 1:
        some = samples[:1000] * 255
        changed = some[(some - some.round()).abs() > _ROUNDED]
        return 0 if changed.median() < _FEWEST_STEPS else 255  # without any it is NaN
    return int(bool((samples == samples.round()).all()))
