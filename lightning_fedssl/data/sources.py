"""Data of your own: where the samples, the labels and the clients' identifiers come from.

A sample is an 8-bit image ``(channels, height, width)`` or numbers of any shape: a table's row ``(features,)``, a
signal ``(channels, time)``, an image ``(channels, height, width)`` of floating numbers. Numbers are held as float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit, check_labels

_MOST_MEASURED = 10_000
"""Training samples from which mean and standard deviation are computed, at most."""


class LoadedData(NamedTuple):
    """What a source gives.

    Attributes:
        spec: Shape, classes and normalisation.
        train: The training samples.
        test: The test samples.
    """

    spec: DatasetSpec
    train: ImageSplit
    test: ImageSplit


class DataSource:
    """Base class of what ``data.dataset`` takes in addition to a name."""

    def load(self) -> LoadedData:
        """Reads specification, training samples and test samples; a second call must give the same."""
        raise NotImplementedError(f"{type(self).__name__} must override load")


class Datasets(DataSource):
    """Map-style PyTorch data sets that give ``(sample, label)``; read once into memory.

    8-bit samples of three dimensions are images; 16-bit images are scaled by their range to 0..1; other numbers are
    taken as they are. They are normalised by mean and standard deviation of the training samples, per first dimension
    (feature or channel), computed from at most 10,000 samples, evenly spread.

    Args:
        train: Training samples and labels.
        test: Test samples and labels.
        client_ids: For every training sample the identifier of its client, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`.
        test_client_ids: For every test sample the identifier of its client.
        class_names: Names of the classes in the order of the labels; if left out, the data set's attribute
            ``classes``, else the classes are numbered up to the largest training label.

    Raises:
        ValueError: If samples differ in shape, hold NaN, or do not fit labels or identifiers; the message names which.
    """

    def __init__(
        self,
        train: Dataset[Any],
        test: Dataset[Any],
        client_ids: Sequence[Any] | None = None,
        test_client_ids: Sequence[Any] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.train = train
        self.test = test
        self.client_ids = client_ids
        self.test_client_ids = test_client_ids
        self.class_names = class_names
        self._loaded: LoadedData | None = None

    def load(self) -> LoadedData:
        """Reads every sample once; see the base class."""
        self._loaded = self._loaded or self._read()
        return self._loaded

    def _read(self) -> LoadedData:
        values, labels = _read("train", self.train)
        test_values, test_labels = _read("test", self.test)
        if values.shape[1:] != test_values.shape[1:] or values.dtype != test_values.dtype:
            raise ValueError(
                f"data.dataset: training samples are {tuple(values.shape[1:])} {values.dtype}, test samples "
                f"{tuple(test_values.shape[1:])} {test_values.dtype}; give both in the same shape and type"
            )
        names = tuple(map(str, self.class_names or getattr(self.train, "classes", ()) or range(int(labels.max()) + 1)))
        mean, std = _measure(values)
        spec = DatasetSpec(
            type(self).__name__, len(names), tuple(values.shape[1:]), mean, std, names,
            pixels=values.dtype == torch.uint8, usual_views=False,
        )  # fmt: skip
        owners, test_owners = _number_clients(self.client_ids, self.test_client_ids)
        for part, ids, rows in (("client_ids", owners, labels), ("test_client_ids", test_owners, test_labels)):
            if ids is not None and len(ids) != len(rows):
                raise ValueError(f"data.dataset: {len(ids)} {part} for {len(rows)} samples; give one for each")
        return LoadedData(
            spec,
            ImageSplit(values, check_labels(labels, len(names), "train"), owners),
            ImageSplit(test_values, check_labels(test_labels, len(names), "test"), test_owners),
        )


class FromLightning(DataSource):
    """The data sets of a Lightning data module: those of its training and its test loader.

    Args:
        datamodule: The data module; its loaders' batch size and order are not used.
        class_names: As in :class:`Datasets`.
    """

    def __init__(self, datamodule: LightningDataModule, class_names: Sequence[str] | None = None) -> None:
        self.datamodule = datamodule
        self.class_names = class_names
        self._datasets: Datasets | None = None

    def load(self) -> LoadedData:
        """Prepares and sets up the data module, and reads both data sets; see the base class."""
        if self._datasets is None:
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            self.datamodule.setup("test")
            train, test = self.datamodule.train_dataloader(), self.datamodule.test_dataloader()
            self._datasets = Datasets(train.dataset, test.dataset, class_names=self.class_names)
        return self._datasets.load()


class BreastCancer(DataSource):
    """scikit-learn's breast-cancer table: 569 rows of 30 features, two classes; nothing to download.

    Of every class, each fifth row in the file's order is a test row, whatever the seed.
    """

    def load(self) -> LoadedData:
        """See the base class."""
        bunch = importlib.import_module("sklearn.datasets").load_breast_cancer()
        labels = torch.from_numpy(bunch.target).long()
        values = torch.from_numpy(bunch.data).float()
        return _split_every_fifth(values, labels, tuple(map(str, bunch.target_names)), "BreastCancer")


class Signals(DataSource):
    """Generated signals of three classes, ``(1, length)``: sine, square wave and sawtooth in noise.

    Frequency (2 to 5 periods) and phase are uniform draws for each signal; Gaussian noise is added.

    Args:
        count: Signals in all; of every class, each fifth is a test signal.
        length: Values of a signal.
        noise: Standard deviation of the noise; the waves have amplitude 1.
        seed: Seed of the generator; it does not depend on the run's seed.
    """

    def __init__(self, count: int = 2000, length: int = 64, noise: float = 1.0, seed: int = 0) -> None:
        self.count = count
        self.length = length
        self.noise = noise
        self.seed = seed

    def load(self) -> LoadedData:
        """See the base class."""
        generator = np.random.default_rng(self.seed)
        labels = np.arange(self.count) % 3
        frequency, phase = generator.uniform(2, 5, (self.count, 1)), generator.uniform(0, 1, (self.count, 1))
        turns = frequency * np.arange(self.length) / self.length + phase
        sine = np.sin(2 * np.pi * turns)
        waves = np.stack([sine, np.sign(sine), 2 * (turns % 1) - 1])
        values = waves[labels, np.arange(self.count)] + generator.normal(0, self.noise, turns.shape)
        names = ("sine", "square", "sawtooth")
        return _split_every_fifth(torch.from_numpy(values).float()[:, None], torch.from_numpy(labels), names, "Signals")


def _split_every_fifth(values: Tensor, labels: Tensor, names: tuple[str, ...], name: str) -> LoadedData:
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(names)):
        is_test[(labels == label).nonzero().flatten()[4::5]] = True
    mean, std = _measure(values[~is_test])
    spec = DatasetSpec(name, len(names), tuple(values.shape[1:]), mean, std, names, pixels=False, usual_views=False)
    return LoadedData(
        spec, ImageSplit(values[~is_test], labels[~is_test]), ImageSplit(values[is_test], labels[is_test])
    )


def _read(part: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        samples, labels = dataset.tensors
    else:
        pairs = [_pair(part, i, dataset[i]) for i in range(len(dataset))]  # type: ignore[arg-type]
        shapes = {tuple(sample.shape) for sample, _ in pairs}
        if len(shapes) != 1:
            raise ValueError(f"data.dataset: {part} samples must have one shape, got {sorted(shapes)[:3]}")
        samples, labels = torch.stack([sample for sample, _ in pairs]), torch.tensor([label for _, label in pairs])
    if len(samples) != len(labels) or not len(samples):
        raise ValueError(f"data.dataset: {part} has {len(samples)} samples and {len(labels)} labels; give one for each")
    return _as_values(samples, part), labels.long()


def _pair(part: str, index: int, item: Any) -> tuple[Tensor, int]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ValueError(f"data.dataset: {part}[{index}] must be (sample, label), got {type(item).__name__}")
    sample, label = item
    if not isinstance(sample, (Tensor, np.ndarray)):
        raise ValueError(
            f"data.dataset: the sample {part}[{index}] is {type(sample).__name__}; give a tensor or an array "
            "(for pictures: torchvision.transforms.v2.functional.pil_to_tensor)"
        )
    return torch.as_tensor(sample), int(label)


def _as_values(samples: Tensor, part: str) -> Tensor:
    """8-bit images as they are, all else as finite float32 numbers."""
    if samples.ndim < 2:
        raise ValueError(f"data.dataset: {part} samples are single numbers; a table's row has shape (features,)")
    if samples.ndim == 4 and not samples.is_floating_point():
        if samples.dtype == torch.uint8:
            return samples
        if samples.dtype != torch.uint16:
            raise ValueError(
                f"data.dataset: {part} images of {samples.dtype} have no fixed range; give uint8, uint16 or float"
            )
        return samples.float() / 65535
    values = samples.float()
    finite = values.isfinite().flatten(1).all(dim=1)
    if not finite.all():
        raise ValueError(
            f"data.dataset: {int((~finite).sum())} of {len(values)} {part} samples hold NaN or infinite values (the "
            f"first is sample {int((~finite).nonzero()[0])}); repair or remove them"
        )
    return values


def _measure(values: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per first dimension; pixels count as 0..1, a constant has deviation 1."""
    some = values[:: -(-len(values) // _MOST_MEASURED)].transpose(0, 1).flatten(1).double()
    some = some / 255 if values.dtype == torch.uint8 else some
    std = some.std(dim=1, correction=0)
    return tuple(some.mean(dim=1).tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())


def _number_clients(train: Sequence[Any] | None, test: Sequence[Any] | None) -> tuple[Tensor | None, Tensor | None]:
    """Clients' numbers, in the sorted order of the training identifiers; -1 for a test sample of no such client."""
    if train is None:
        if test is not None:
            raise ValueError("data.dataset: test_client_ids need client_ids of the training samples")
        return None, None
    ids = [i.item() if isinstance(i, (Tensor, np.generic)) else i for i in train]
    numbers = {name: number for number, name in enumerate(sorted(set(ids)))}
    owners = torch.tensor([numbers[i] for i in ids])
    if test is None:
        return owners, None
    others = [i.item() if isinstance(i, (Tensor, np.generic)) else i for i in test]
    return owners, torch.tensor([numbers.get(i, -1) for i in others])
