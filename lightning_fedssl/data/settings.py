"""What is asked of the data: checks of the values, and the source of the data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_fedssl.data import datasets
from lightning_fedssl.data.augment.views import STRONG, WEAK
from lightning_fedssl.data.datasets import DatasetSpec, shortened
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.sources.arrays import Arrays
from lightning_fedssl.data.sources.base import DataSource
from lightning_fedssl.data.sources.image_lists import ImageFolder, ImageTable
from lightning_fedssl.data.sources.lightning_data import FromLightning
from lightning_fedssl.data.sources.table import Table
from lightning_fedssl.task import Task

_COUNTS: dict[str, tuple[str | None, ...]] = {
    "num_clients": (),
    "server_batch_size": (),
    "client_batch_size": (),
    "eval_batch_size": (),
    "num_labels": ("all",),
    "image_size": (None,),
    "max_train_images": (None,),
    "max_test_images": (None,),
}
"""Whole numbers from 1, by key, and what else each may be."""

_NAMES = {"label_location": ("server", "clients"), "weak": WEAK, "strong": STRONG}
"""Names by key."""


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that a configuration's types cannot.

    Args:
        values: The arguments of the data module by key.

    Raises:
        ValueError: Names the key.
    """
    task, partition = values["task"], values["partition"]
    if not isinstance(task, Task):
        raise ValueError(f"data.task is {task!r}; in Python give an object: MultiLabel()")
    for key, others in _COUNTS.items():
        value = values[key]
        is_count = type(value) is int and 1 <= value < 10**18
        if not is_count and value not in others:
            also = ', or "all"' if key == "num_labels" else ""
            raise ValueError(
                f"data.{key} must be a whole number from 1 to 1e18{also}; got {shortened(value)}"
            )
    for key, names in _NAMES.items():
        value = values[key]
        if isinstance(value, str) and value not in names:
            raise ValueError(
                f"data.{key} must be one of {', '.join(names)}; got {shortened(value)}"
            )
    normalize, held_out = values["normalize"], values["validation"]
    if isinstance(normalize, dict) and normalize.keys() != {"mean", "std"}:
        raise ValueError(
            "data.normalize must be true, false, or {mean: [...], std: [...]}; got "
            f"{shortened(normalize)}"
        )
    if held_out != "test" and not (isinstance(held_out, (int, float)) and 0 <= held_out < 1):
        raise ValueError(
            f'data.validation must be a fraction from 0 to below 1, or "test"; got {held_out}'
        )
    if not isinstance(partition, Partition):
        raise ValueError(
            f"data.partition is {partition!r}; in Python give an object such as Dirichlet(0.3)"
        )


def check_inputs(values: Mapping[str, Any], spec: DatasetSpec) -> None:
    """Refuse a backbone or a normalisation that does not fit the samples or their task.

    Args:
        values: The arguments of the data module by key.
        spec: The specification of the data set.

    Raises:
        ValueError: Names the key.
    """
    backbone, normalize = values["backbone"], values["normalize"]
    if values["task"].per_pixel and backbone is not None:
        raise ValueError(
            "data.backbone: a target for every pixel needs the stored pixels; leave it out"
        )
    channels = spec.in_shape[0]
    if isinstance(normalize, dict) and (
        backbone is not None or set(map(len, normalize.values())) != {channels}
    ):
        raise ValueError(
            f"data.normalize needs a mean and a std for each of {channels} channels; a backbone "
            "takes its own as data.backbone.init_args.mean and .std"
        )


def source_of(
    dataset: DataSource | LightningDataModule | str | Path,
    root: str,
    image_size: int | None,
    backbone_size: int | None,
) -> DataSource | None:
    """The source of data that is given by class, file or folder; None for the name of a data set.

    Args:
        dataset: ``data.dataset``.
        root: ``data.root``, the folder of ``image_folder``.
        image_size: ``data.image_size``.
        backbone_size: The side of the images of ``data.backbone``, if it has one.

    Raises:
        ValueError: If there is no such data set, or the size is missing or has no effect.
    """
    size = image_size or backbone_size
    source: DataSource | None = None
    if isinstance(dataset, DataSource):
        source = dataset
    elif isinstance(dataset, LightningDataModule):
        source = FromLightning(dataset)
    elif (file := Path(dataset)).suffix in (".csv", ".npz") and file.is_file():
        if size is not None and file.suffix == ".csv":
            return ImageTable(str(file), size)
        source = Table(str(file)) if file.suffix == ".csv" else Arrays(str(file))
    elif datasets.canonical_name(str(dataset)) == datasets.IMAGE_FOLDER:
        if size is None:
            raise ValueError(
                "data.image_size: image_folder needs the side of its images in pixels, e.g. 32"
            )
        return ImageFolder(root, size)
    if image_size is not None:
        raise ValueError(
            "data.image_size is for image_folder and a .csv file of images; leave it out"
        )
    return source
