"""Data that only one machine has: the server's labelled and test images, and each node's own
images.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.data import image_files
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.held_out import TrainingRows
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.data.sources.arrays import (
    as_pixels,
    as_tensor,
    as_values,
    load_arrays,
)
from lightning_fedssl.data.sources.base import DataSource, read_csv
from lightning_fedssl.data.sources.reading import NO_LABEL, Reading
from lightning_fedssl.data.table_rows import encode_rows
from lightning_fedssl.deployment.obstacles import refuse_other_tasks
from lightning_fedssl.task import check_labels

Parts = tuple[Tensor, Tensor, Tensor]
"""Labelled samples, their labels and unlabelled samples."""


@dataclass(frozen=True, eq=False)
class SplitOverMachines(FederatedSplit):
    """A split with the server's own images, and of each client only the number of images."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 over seed, the server's images and the number of clients.

        Clients may connect later than others.
        """
        content = {
            "seed": self.seed,
            "server_labeled": self.server_labeled.tolist(),
            "clients": len(self.clients),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ServerData(FederatedDataModule):
    """The data of a server whose clients have data of their own.

    The training images of ``data.dataset`` are the server's labelled images, less those held out
    for validation; where labels are at the clients, they are not used. The clients' images are
    numbered but not here: to read one is an error.

    Attributes:
        client_sizes: By client, the number of its labelled and of its unlabelled images, as its
            node has named them.
    """

    client_sizes: Mapping[int, tuple[int, int]] = {}

    def own_data_hash(self) -> str:
        """None: the clients' part of the labels changes with every client that connects."""
        return ""

    @property
    def constants_of_clients(self) -> list[str]:
        """None: they are those of the server's samples."""
        return []

    def clients_without_images(self) -> list[int]:
        """Those whose nodes have said so; of a client that connects later, nothing is known yet."""
        return [
            client for client in super().clients_without_images() if client in self.client_sizes
        ]

    def _partition(self, seed: int, rows: TrainingRows) -> None:
        refuse_other_tasks(self.task)
        if self.class_shares not in (None, {"of": "nodes"}):
            raise ValueError(
                "data.class_shares: with --own_data give {of: nodes}: each node states its own, by "
                "--node-config 'class-shares=\"{yes: 0.2, no: 0.8}\"'"
            )
        server_labels = self._train.labels
        at_server = (rows.available >= 0).nonzero().flatten()
        server = at_server if self.label_location == "server" else at_server[:0]
        clients = []
        end = len(server_labels)
        for client in range(self.num_clients):
            sizes = self.client_sizes.get(client, (0, 0))
            numbers = torch.arange(end, end + sum(sizes))
            clients.append(ClientIndices(*numbers.split(list(sizes))))
            end += sum(sizes)
        labels = torch.cat([server_labels, torch.full((end - len(server_labels),), -1)])
        self._train = ImageSplit(self._train.images, labels)
        used = torch.cat(
            [rows.available >= 0, torch.ones(end - len(server_labels), dtype=torch.bool)]
        )
        self._assign(SplitOverMachines(seed, server, clients), used)


class OwnData:
    """The data of a node with one client: images that are nowhere else.

    Args:
        datamodule: Of the same configuration as the server's; it knows the views and the batch
            size.
        path: A folder with ``labeled/CLASS/`` and ``unlabeled/``, each of which may be missing; of
            a table a ``.csv`` file with the server's columns, without a label where there is none;
            or a ``.csv`` file with the columns ``file`` and ``label``, which is empty for an image
            without a label; or an ``.npz`` file with the arrays ``labeled``, ``labels`` and
            ``unlabeled``: samples before they are normalised, of the type of the server's samples.
            Where these are not 8-bit pixels, only an ``.npz`` file.
        client: The number of the client.
        algorithm: The method, if labelled images alone are refused where it does not use them.

    Raises:
        FileNotFoundError: If there is no such path.
        ValueError: If the samples or labels do not fit the data that the app was written for.
    """

    def __init__(
        self,
        datamodule: FederatedDataModule,
        path: Path,
        client: int,
        algorithm: FederatedAlgorithm | None = None,
    ) -> None:
        self.client = client
        self._datamodule = datamodule
        spec = datamodule.spec
        if not path.exists():
            raise FileNotFoundError(
                f"{_KEY} {str(path)!r} do not exist: give a folder, a .csv or an .npz file"
            )
        of_table = bool(spec.inputs) and path.suffix == ".csv"
        if path.suffix != ".npz" and not (spec.pixels or of_table):
            raise ValueError(
                f"{_KEY} {str(path)!r}: the app is for numbers that are not pixels: give an .npz "
                f"file{', or a .csv file with the columns of the server' * bool(spec.inputs)}"
            )
        readers = {".npz": _read_arrays, ".csv": _read_rows if of_table else _read_table}
        labeled, labels, unlabeled = readers.get(path.suffix, _read_folder)(path, spec)
        shapes = {tuple(part.shape[1:]) for part in (labeled, unlabeled) if len(part)}
        if shapes != {spec.in_shape} or len(labeled) != len(labels):
            raise ValueError(
                f"{path} has samples of the shapes {sorted(shapes)}, and {len(labels)} labels of "
                f"{len(labeled)} samples; the app takes samples {spec.in_shape}, and a label for "
                "each labelled one"
            )
        if isinstance(algorithm, SemiFL) and not len(unlabeled):
            raise ValueError(
                f"{path} has labelled images alone, and the method uses none: leave labels out"
            )
        images = torch.cat([labeled, unlabeled])
        if datamodule.backbone is not None:
            images = datamodule.inputs.extractor(images, augmented=True)
        with_label, without_label = torch.arange(len(images)).split([len(labeled), len(unlabeled)])
        self._data = LocalData(
            party=client,
            round=0,
            seed=sampling.global_seed(),
            images=images,
            labeled=with_label,
            labels=check_labels(labels, spec.num_classes, str(path)),
            unlabeled=without_label,
            batch_size=datamodule.client_batch_size,
            views=datamodule.inputs.views(),
        )

    def local_data(self, round_index: int, dtype: torch.dtype) -> LocalData:
        """What the client may train on in a round."""
        views = self._datamodule.inputs.views(dtype)
        return replace(self._data, round=round_index, dtype=dtype, views=views)


def _read_arrays(path: Path, spec: DatasetSpec) -> Parts:
    """Labelled samples, their labels and unlabelled samples of an ``.npz`` file."""
    arrays = load_arrays(str(path), _KEY)
    if unknown := sorted(arrays.keys() - {"labeled", "labels", "unlabeled"}):
        raise ValueError(
            f"{path} has an array {unknown[0]!r}; the arrays are labeled, labels and unlabeled"
        )
    labels = arrays.get("labels", np.zeros(0, dtype=np.int64))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: labels is {labels.dtype} {labels.shape}; give one class number for each "
            "sample"
        )
    samples = [_as_samples(arrays, name, path, spec) for name in ("labeled", "unlabeled")]
    return samples[0], torch.from_numpy(labels.astype(np.int64)), samples[1]


def _as_samples(arrays: Mapping[str, Any], name: str, path: Path, spec: DatasetSpec) -> Tensor:
    """An array as the samples of the app, converted as the server's are: 8-bit pixels, or finite
    numbers.
    """
    array = arrays.get(name, np.zeros(0))
    if array.shape[:1] == (0,):
        return torch.zeros(0, *spec.in_shape, dtype=torch.uint8 if spec.pixels else torch.float32)
    samples = torch.zeros(0)
    if array.dtype.kind in "uif":
        samples = as_values(as_tensor(array), name, str(path))
        samples = as_pixels({name: samples})[name] if spec.pixels else samples
    if not len(samples) or spec.pixels != (samples.dtype == torch.uint8):
        expected = (
            "pixels from 0 to 255 as uint8"
            if spec.pixels
            else "numbers that are not 8-bit pixels, such as float32"
        )
        raise ValueError(f"{path}: {name} is {array.dtype}; the app takes {expected}")
    return Reading(_KEY).cast({name: samples})[name]


def _read_folder(path: Path, spec: DatasetSpec) -> Parts:
    """Labelled images, their labels and unlabelled images of a folder, each in the order of the
    files' names.
    """
    left_out = Counter[str]()
    folder = path / "unlabeled"
    labeled = [
        (file, of_class.name)
        for of_class in image_files.visible_folders(path / "labeled", left_out)
        for file in image_files.image_files(of_class, _KEY, left_out)
    ]
    unlabeled = image_files.image_files(folder, _KEY, left_out) if folder.is_dir() else []
    if left_out:
        Reading(_KEY).warn(f"{path.name}{image_files.described(left_out)}")
    return _read_images(path, labeled, unlabeled, spec)


def _read_table(path: Path, spec: DatasetSpec) -> Parts:
    """Labelled images, their labels and unlabelled images of a CSV file, whose file names are
    relative to it.
    """
    rows = read_csv(path, ["file", "label"], Reading(_KEY))
    files = [(path.parent / row["file"], row["label"]) for row in rows]
    labeled = [(file, label) for file, label in files if label not in NO_LABEL]
    unlabeled = [file for file, label in files if label in NO_LABEL]
    return _read_images(path, labeled, unlabeled, spec)


def _read_rows(path: Path, spec: DatasetSpec) -> Parts:
    """Rows of a CSV file with the server's columns, by the server's medians and categories."""
    rows = read_csv(path, [each["column"] for each in spec.inputs], Reading(_KEY))
    words = [row.get(spec.label_column, "") for row in rows]
    numbers = {name: number for number, name in enumerate(spec.class_names)}
    numbers |= dict.fromkeys(NO_LABEL, -1)
    if unknown := sorted({*words} - numbers.keys()):
        raise ValueError(
            f"{path} has a class {unknown[0]!r} in the column {spec.label_column!r}; the classes "
            f"are {', '.join(spec.class_names)}, and an empty cell is not a label"
        )
    labels = torch.tensor([numbers[word] for word in words], dtype=torch.int64)
    samples = encode_rows(rows, spec.inputs).float()
    return samples[labels >= 0], labels[labels >= 0], samples[labels < 0]


def _read_images(
    path: Path, labeled: Sequence[tuple[Path, str]], unlabeled: Sequence[Path], spec: DatasetSpec
) -> Parts:
    """Labelled images, their labels and unlabelled images."""
    if unknown := [name for _, name in labeled if name not in spec.class_names]:
        raise ValueError(
            f"{path} has a class {unknown[0]!r}; the classes are {', '.join(spec.class_names)}"
        )
    if not labeled and not unlabeled:
        raise ValueError(
            f"{_KEY} {str(path)!r} have no image: give images in labeled/CLASS/ or unlabeled/, or "
            "rows"
        )
    files = [*(file for file, _ in labeled), *unlabeled]
    images = image_files.read_images(files, spec.in_shape, key=_KEY)
    labels = torch.tensor([spec.class_names.index(name) for _, name in labeled], dtype=torch.int64)
    return images[: len(labeled)], labels, images[len(labeled) :]


_KEY = "the node's data"


def save_spec(spec: DatasetSpec, path: Path) -> None:
    """Write what a node must know of the data before it reads its own."""
    path.write_text(json.dumps(asdict(spec), indent=1), encoding="utf-8")


def module_of_spec(path: Path) -> type[FederatedDataModule]:
    """A data module for a node: its specification is that of a file, and it reads no data.

    Args:
        path: What :func:`save_spec` wrote.
    """
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    spec = DatasetSpec(**values)

    class Described(DataSource):
        """Knows the specification of the data."""

        def describe(self) -> DatasetSpec:
            return spec

    class NodeDataModule(FederatedDataModule):
        """Reads no data."""

        def _source_of(self, dataset: object) -> DataSource:
            return Described()

    return NodeDataModule
