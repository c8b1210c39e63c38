"""The base class of data sources, and the values that a source returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit

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
        decodes_images: Whether it decodes image files, which ``data.cache_dir`` can hold.
        cache_dir: Set by the data module to ``data.cache_dir``.
    """

    decodes_images: ClassVar[bool] = False
    cache_dir: str | None = None

    def load(self) -> LoadedData:
        """Reads specification and samples; a second call must give the same."""
        raise NotImplementedError(f"{type(self).__name__} must override load")

    def describe(self) -> DatasetSpec:
        """The specification; overridden where it is known without reading every sample."""
        return check_loaded(self.load(), type(self).__name__).spec


def check_loaded(loaded: object, name: str) -> LoadedData:
    """The data that a source loaded, after a check that a class of the user's own made no usual mistake.

    Args:
        loaded: What ``load`` returned.
        name: The source's class, for messages.

    Raises:
        ValueError: If a part is of another type, or the parts do not fit each other; names the part.
    """
    if not isinstance(loaded, LoadedData):
        raise ValueError(
            f"data.dataset: {name}.load returned {type(loaded).__name__}; return LoadedData(spec, train, test)"
        )
    _check_spec(loaded.spec, name)
    for part in ("train", "test", "validation"):
        split = getattr(loaded, part)
        if split is not None or part != "validation":
            _check_split(split, loaded.spec, f"data.dataset: {name}: the {part} data")
    return loaded


def _check_spec(spec: object, name: str) -> None:
    who = f"data.dataset: {name}: the DatasetSpec"
    if not isinstance(spec, DatasetSpec):
        raise ValueError(f"data.dataset: {name}: LoadedData.spec is {type(spec).__name__}; give a DatasetSpec")
    if len(spec.class_names) != spec.num_classes:
        raise ValueError(f"{who} has {spec.num_classes} classes and {len(spec.class_names)} class_names; name them all")
    if not len(spec.mean) == len(spec.std) == spec.in_shape[0]:
        raise ValueError(
            f"{who} has {len(spec.mean)} means and {len(spec.std)} standard deviations; give one of each for every "
            f"entry of the first dimension of in_shape {spec.in_shape}"
        )
    if not all(map(math.isfinite, (*spec.mean, *spec.std))) or min(spec.std) <= 0:
        raise ValueError(f"{who} has mean {spec.mean} and std {spec.std}; give finite means, and deviations above 0")


def _check_split(split: object, spec: DatasetSpec, who: str) -> None:
    if not isinstance(split, ImageSplit):
        raise ValueError(f"{who} are {type(split).__name__}; give an ImageSplit(samples, labels)")
    images, labels, clients = split.images, split.labels, split.client_ids
    if tuple(images.shape[1:]) != tuple(spec.in_shape):
        raise ValueError(
            f"{who} have samples of shape {tuple(images.shape[1:])}, and in_shape of DatasetSpec is {spec.in_shape}"
        )
    if len(labels) != len(images):
        raise ValueError(f"{who} have {len(images)} samples and {len(labels)} labels; give one for each")
    if clients is not None and not (isinstance(clients, Tensor) and clients.dtype == torch.int64):
        raise ValueError(f"{who} have client_ids that are no int64 tensor; number the clients from 0")
    if clients is not None and len(clients) != len(images):
        raise ValueError(f"{who} have {len(images)} samples and {len(clients)} client_ids; give one for each")
    if split.files and len(split.files) != len(images):
        raise ValueError(f"{who} have {len(images)} samples and {len(split.files)} files; give one for each, or none")
    if not spec.pixels and not (finite := images.isfinite().flatten(1).all(dim=1)).all():
        raise ValueError(
            f"{who} hold NaN or infinite values in {int((~finite).sum())} of {len(images)} samples (the first is "
            f"sample {int((~finite).nonzero()[0])}); repair or remove them"
        )


def measure(values: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per first dimension; pixels count as 0..1, a constant has deviation 1.

    Args:
        values: ``(N, ...)``; at most 10,000 samples, evenly spread, are used.
    """
    some = values[:: -(-len(values) // _MOST_MEASURED)].transpose(0, 1).flatten(1).double()
    some = some / 255 if values.dtype == torch.uint8 else some
    std = some.std(dim=1, correction=0)
    return tuple(some.mean(dim=1).tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())


def number_clients(*parts: Sequence[Any] | None) -> list[Tensor | None]:
    """Replaces clients' identifiers by numbers, in the sorted order of the identifiers of the first part.

    Args:
        parts: Identifiers of the training samples, then of test samples; None for a part without. A test sample whose
            identifier is None belongs to no client.

    Returns:
        For every part the numbers, int64; -1 for an identifier that the first part does not have, with a warning.

    Raises:
        ValueError: If only a later part has identifiers, or they are of several types.
    """
    ids = [None if part is None else [_plain(i) for i in part] for part in parts]
    if ids[0] is None:
        if any(part is not None for part in ids):
            raise ValueError("data.dataset: test_client_ids need client_ids of the training samples")
        return [None] * len(ids)
    later = [name for part in ids[1:] for name in part or () if name is not None]
    kinds = sorted({type(name).__name__ for name in (*ids[0], *later)})
    if len(kinds) > 1 and not {*kinds} <= {"int", "float", "bool"}:
        raise ValueError(f"data.dataset: the identifiers of clients are of the types {', '.join(kinds)}; give one type")
    numbers = {name: number for number, name in enumerate(sorted(set(ids[0])))}
    _check_known(set(later), numbers)
    return [None if part is None else torch.tensor([numbers.get(i, -1) for i in part]) for part in ids]


def _check_known(tested: set[Any], numbers: dict[Any, int]) -> None:
    """Names the clients of test samples that have no training sample, which may be intended or misspelt."""
    unknown = sorted(tested - numbers.keys())
    if not unknown:
        return
    some = ", ".join(map(repr, unknown[:3])) + ", ..." * (len(unknown) > 3)
    from lightning.pytorch.utilities import rank_zero_warn  # imported late: it takes seconds

    rank_zero_warn(
        f"data.dataset: {len(unknown)} of {len(tested)} clients of the test samples ({some}) have no training sample; "
        "their test samples belong to no client, unless you name them as in the training data"
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (Tensor, np.generic)) else value
