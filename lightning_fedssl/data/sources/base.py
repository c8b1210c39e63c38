"""The base class of data sources, the values that a source returns, and the one check of what it
returned.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit, Moments
from lightning_fedssl.data.sources.reading import UNKNOWN, Reading, cut
from lightning_fedssl.functional.frozen import listed
from lightning_fedssl.task import Classification, Task

_MOST_MEASURED = 10_000
"""The largest number of training samples from which mean and standard deviation are computed."""


class LoadedData(NamedTuple):
    """The data of a source.

    Attributes:
        spec: Shape, classes and normalisation.
        train: The training samples. A sample with the label -1 has no label; only clients get it.
        test: The test samples.
        validation: The validation samples; None if the source has none of its own.
    """

    spec: DatasetSpec
    train: ImageSplit
    test: ImageSplit
    validation: ImageSplit | None = None


class DataSource:
    """Base class of data sources, which ``data.dataset`` takes in addition to a name.

    Attributes:
        cache_dir: Set by the data module to ``data.cache_dir``, for sources that decode image
            files.
        task: Set by the data module to ``data.task``.
    """

    cache_dir: str | None = None
    task: Task = Classification()

    @cached_property
    def reading(self) -> Reading:
        """The report of what was read; a reader adds columns, files and warnings to it."""
        return Reading()

    def load(self) -> LoadedData:
        """Reads specification and samples; a second call must give the same."""
        raise NotImplementedError(f"{type(self).__name__} must override load")

    def describe(self) -> DatasetSpec:
        """The specification; overridden where it is known without reading every sample."""
        return check_loaded(self.load(), type(self).__name__, self.task).spec


def check_loaded(loaded: object, name: str, task: Task) -> LoadedData:
    """The data that were loaded, after the check of everything that later code relies on.

    Args:
        loaded: What ``load`` returned.
        name: The data set or the source's class, for messages.
        task: What is predicted.

    Raises:
        ValueError: If a part is of another type, or the parts do not fit each other; names the
            part.
    """
    if not isinstance(loaded, LoadedData) or not isinstance(loaded.spec, DatasetSpec):
        raise ValueError(
            f"data.dataset: {name}.load must return LoadedData(DatasetSpec(...), train, test)"
        )
    spec = loaded.spec
    source = f"data.dataset: {name}"
    if spec.num_classes < task.min_classes:
        raise ValueError(
            f"{source}: there is one class ({', '.join(spec.class_names)}) or none; two are "
            "needed, and -1 and empty words are not labels"
        )
    if (
        len(spec.class_names) != spec.num_classes
        or not len(spec.mean) == len(spec.std) == spec.in_shape[0]
    ):
        raise ValueError(
            f"{source}: DatasetSpec has {spec.num_classes} classes, {len(spec.class_names)} "
            f"class_names, {len(spec.mean)} means and {len(spec.std)} stds for in_shape "
            f"{spec.in_shape}; name all classes, and give a mean and a std for every entry of the "
            "first dimension"
        )
    train = _checked(loaded.train, spec, task, f"{source}: train", allow_missing=True)
    test = _checked(loaded.test, spec, task, f"{source}: test")
    validation = loaded.validation
    if validation is not None:
        validation = _checked(validation, spec, task, f"{source}: validation")
    if not all(map(math.isfinite, (*spec.mean, *spec.std))) or min(spec.std) <= 0:
        raise ValueError(
            f"{source}: mean {spec.mean} and std {spec.std} of DatasetSpec must be finite, and std "
            "above 0"
        )
    return LoadedData(spec, train, test, validation)


def _checked(
    split: ImageSplit, spec: DatasetSpec, task: Task, source: str, allow_missing: bool = False
) -> ImageSplit:
    images = split.images.detach()
    labels = split.labels
    expected = torch.uint8 if spec.pixels else torch.float32
    fits = images.dtype in (expected, torch.uint8 if spec.pixels else torch.float64)
    if tuple(images.shape[1:]) != tuple(spec.in_shape) or not fits or not len(images):
        raise ValueError(
            f"{source}: {len(images)} samples are {tuple(images.shape[1:])} {images.dtype}, and "
            f"DatasetSpec says {tuple(spec.in_shape)} {expected}; numbers that are not 8-bit "
            "pixels need float32 and pixels=False"
        )
    parts = {"labels": labels, "client_ids": split.client_ids, "files": split.files or None}
    for part, values in parts.items():
        if values is not None and len(values) != len(images):
            raise ValueError(
                f"{source}: {len(images)} samples and {len(values)} {part}; give one for each"
            )
    check_finite(images, source)
    targets = task.checked(labels, spec.num_classes, source, allow_missing)
    if task.per_pixel and targets.shape[1:] != images.shape[2:]:
        raise ValueError(
            f"{source}: the masks are {tuple(targets.shape[1:])} and the images "
            f"{tuple(images.shape[2:])} pixels; give a mask of the size of its image"
        )
    return replace(split, images=images, labels=targets)


def check_finite(samples: Tensor, source: str) -> None:
    """Refuses samples with NaN or infinite values.

    Args:
        samples: ``(N, ...)``.
        source: The key and the part of the data, with which a message starts.

    Raises:
        ValueError: Naming the first such sample.
    """
    wrong = (~samples.isfinite().flatten(1).all(dim=1)).nonzero().flatten()
    if len(wrong):
        raise ValueError(
            f"{source}: {len(wrong)} of {len(samples)} samples hold NaN or infinite values (the "
            f"first is sample {int(wrong[0])}); repair or remove them"
        )


def measure(values: Tensor) -> Moments:
    """Mean and standard deviation per first dimension.

    Pixels count as 0..1, a constant has deviation 1.

    Args:
        values: ``(N, ...)``; at most 10,000 samples, evenly spread, are used.
    """
    some = values[:: -(-len(values) // _MOST_MEASURED)].transpose(0, 1).flatten(1).double()
    some = some / 255 if values.dtype == torch.uint8 else some
    std = some.std(dim=1, correction=0)
    return tuple(some.mean(dim=1).tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())


def number_clients(
    ids: Sequence[Any] | None, test_ids: Sequence[Any] | None
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Replaces clients' identifiers by numbers, in the sorted order of the identifiers of the
    training samples.

    Args:
        ids: Identifiers of the training samples; None if there are none.
        test_ids: Identifiers of the test samples, None for a sample that belongs to no client.

    Returns:
        The numbers of both, int64, -1 for a test client without training samples, which a warning
        names; and the names of the clients.

    Raises:
        ValueError: If only test samples have identifiers, or they cannot be sorted.
    """
    if ids is None:
        if test_ids is not None:
            raise ValueError(
                "data.dataset: test_client_ids need client_ids of the training samples"
            )
        return None, None, ()
    identifiers = [*map(_plain, ids)]
    of_test_samples = [*map(_plain, () if test_ids is None else test_ids)]
    try:
        if any(name != name for name in identifiers):  # NaN
            raise TypeError("missing")
        names = sorted(set(identifiers))
    except TypeError as error:
        raise ValueError(
            "data.dataset: identifiers of clients are of several types, or some are missing"
        ) from error
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := sorted({*of_test_samples} - {None, *names}):
        rank_zero_warn(
            f"data.dataset: no training sample has the client {', '.join(map(repr, unknown[:3]))} "
            f"({len(unknown)} in all), so its test samples belong to no client"
        )
    of_train, of_test = (
        torch.tensor([numbers.get(i, -1) for i in p]) for p in (identifiers, of_test_samples)
    )
    return of_train, None if test_ids is None else of_test, tuple(map(str, names))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (Tensor, np.generic)) else value


class Row(dict[str, str]):
    """The values of a row by the names of their columns.

    Attributes:
        number: The row's number in the file, as a spreadsheet shows it: the head is row 1.
    """

    number: int


_DECIMAL_COMMA = re.compile(r"^([-+]?[\d.]+),(\d+)$")

THOUSANDS = re.compile(r"^([-+]?[1-9]\d{0,2})\.(\d{3})(?:\.(\d{3}))?(?=,\d+$|$)")
"""1.234 is a thousand and more where all fractions of a column look like this one; four groups are
an address of the internet."""

_FRACTION = re.compile(rf"(?!{THOUSANDS.pattern})[-+]?\d*\.\d+$")


def read_csv(path: str | Path, columns: Collection[str], reading: Reading) -> list[Row]:
    """The rows of a CSV file in UTF-8 with a head, without blanks around names and values.

    Of a file with semicolons in place of commas, 1,5 is 1.5, as spreadsheets of many countries have
    it, and 1.234 in the same column 1234, unless its other cells show that dots are decimal, too.

    Rows without any value are left out, with a warning.

    Args:
        path: The file.
        columns: The columns that it must have.
        reading: Takes the warning; its key is how a message begins.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the text cannot be read, a column is missing or named twice, or a row has
            another number of values.
    """
    key = reading.key
    if not Path(path).is_file():
        raise FileNotFoundError(f"{key}: the file {str(path)!r} does not exist")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            separator = ";" if ";" in first and "," not in first else ","
            file.seek(0)
            head, *rows = ([*map(str.strip, row)] for row in csv.reader(file, delimiter=separator))
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise ValueError(
            f"{key}: {str(path)!r} is not a CSV file in UTF-8 with a head ({error}); save it as "
            "CSV in UTF-8"
        ) from error
    if missing := [column for column in columns if column not in head]:
        raise ValueError(
            f"{key}: {str(path)!r} has no column {', '.join(map(repr, missing))}; there are "
            f"{listed(head)}, which commas or semicolons must separate; label_column and its like "
            "name others"
        )
    if double := [name for name, count in Counter(head).items() if name and count > 1]:
        raise ValueError(
            f"{key}: {str(path)!r} has several columns {cut(double[0])!r}; rename or remove them"
        )
    records = []
    empty = []
    for number, values in enumerate(rows, start=2):
        if not any(values):
            empty += [number] if values else []  # a blank line is not counted
            continue
        if len(values) != len(head):
            raise ValueError(
                f"{key}: {str(path)!r}, row {number} has {len(values)} values for {len(head)} "
                "columns"
            )
        row = Row(zip(head, values, strict=True))
        row.number = number
        records.append(row)
    if empty:
        reading.warn(
            f"{Path(path).name}: rows without any value are left out ({len(empty)} in all; the "
            f"first is row {empty[0]})"
        )
    if separator == ";":
        for name in head:
            _read_decimal_commas(records, name)
    return records


def _read_decimal_commas(rows: Sequence[Row], name: str) -> None:
    """Write the numbers of a column with decimal commas as Python does."""
    cells = [row[name] for row in rows]
    grouped = any(map(_DECIMAL_COMMA.match, cells)) and not any(map(_FRACTION.match, cells))
    for row in rows:
        number = THOUSANDS.sub(r"\1\2\3", row[name]) if grouped else row[name]
        row[name] = _DECIMAL_COMMA.sub(r"\1.\2", number)


def part_of(word: str) -> str:
    """The part that a cell of a split column names; ``val`` and ``valid`` are validation, case does
    not count.
    """
    part = word.lower()
    other = {"val": "validation", "valid": "validation", "unlabelled": "unlabeled"}
    return other.get(part, part)


def client_of(cell: str) -> str | None:
    """The client that a cell names; None for a missing one."""
    return None if cell in UNKNOWN else cell
