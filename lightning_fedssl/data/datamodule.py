"""The data of a simulated federation: one data set, its partition, and batches for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedssl import sampling
from lightning_fedssl.data import datasets
from lightning_fedssl.data.augment.custom import BatchView, check_view, views_of
from lightning_fedssl.data.datasets import ImageSplit
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.data.partition.base import Iid, Partition
from lightning_fedssl.data.partition.class_balance import choose_balanced, choose_stratified
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.natural import NaturalClients
from lightning_fedssl.data.partition.statistics import PartitionStatistics, statistics
from lightning_fedssl.data.sources import Datasets, DataSource

if TYPE_CHECKING:
    Name = str
else:
    try:
        from jsonargparse.typing import restricted_string_type
    except ImportError:  # benchmarks run without the command line's library
        Name = str
    else:  # a mistake in the arguments of a class, {class_path: ...}, must not pass for a name
        Name = restricted_string_type("Name", r"^[^{].*$")
_LABEL_LOCATIONS = ("server", "clients")
_WEAK = ("auto", "flip_crop", "crop", "none")
_STRONG = ("auto", "fixmatch", "semifl", "fedmatch", "digits", "none")


class FederatedDataModule(LightningDataModule):
    """A data set assigned to a server and many clients.

    The images live on the device as uint8; every party's data is a list of indices into them. The partition is a
    function of ``seed_everything`` and of the keys here, and of nothing else, so every method runs on the same one.

    Args:
        dataset: Name of the data set: digits, mnist, fashion_mnist, emnist (balanced), cifar10, cifar100, svhn, stl10,
            or image_folder for your own (case, hyphens and underscores do not count); or a source of data by class:
            Datasets, FromLightning, BreastCancer, Signals, or a class of your own derived from DataSource.
        root: The data folder, as torchvision lays it out; for image_folder it holds train/<class>/ and test/<class>/.
        download: Let torchvision download missing files.
        num_clients: Number of clients, M.
        num_labels: Number of labelled images in the whole federation, N_s, balanced over the classes; or all.
        label_location: Who holds the labelled images: the server, or the clients.
        partition: How the images are assigned: Iid (default), Shards, Dirichlet, FromFile, or a class of your own.
        server_batch_size: Images per step at the server.
        client_batch_size: Images per local step at a client.
        validation: Fraction of the training images that is held out, with labels and stratified by class, before the
            federation is made, in [0, 1); 0 for no validation. The word test uses the test images instead, as many
            papers do: then the best round is chosen on the images that are reported.
        eval_batch_size: Images per batch in evaluation.
        weak: Weak augmentation: auto (the data set's usual one), flip_crop, crop, none, or a function of a batch and
            keys; see :mod:`lightning_fedssl.data.augment.custom`.
        strong: Strong augmentation: auto, fixmatch, semifl, fedmatch, digits, none (the weak one), or a function.
        normalize: Shift and scale the pixels by the data set's mean and standard deviation; without, they are 0 to 1.
        image_size: Side of the images in pixels; for image_folder only, and needed there.
        max_train_images: Use at most this many training images, balanced over the classes, for a quick trial.
        max_test_images: Use at most this many test images, balanced over the classes, for a quick trial.
        predict_root: A folder of new images for ``predict``, with any folders below it; the test images if left out.

    Raises:
        ValueError: If a value is out of range; the message names the key.
        FileNotFoundError: If dataset is image_folder and there are no class folders.
    """

    split: FederatedSplit
    statistics: PartitionStatistics
    views: Views
    seed: int
    _train: ImageSplit
    _test: ImageSplit
    _validation: Tensor
    _pool: Tensor
    _outside_server: Tensor
    _labeled: list[Tensor]
    _labels: list[Tensor]
    _unlabeled: list[Tensor]

    def __init__(
        self,
        dataset: DataSource | Name = "digits",
        root: str = "data",
        download: bool = False,
        num_clients: int = 100,
        num_labels: int | Literal["all"] = 100,
        label_location: Literal["server", "clients"] = "server",
        partition: Partition | None = None,
        server_batch_size: int = 10,
        client_batch_size: int = 10,
        validation: float | Literal["test"] = 0.1,
        eval_batch_size: int = 250,
        weak: BatchView | Callable[..., Any] | Name = "auto",
        strong: BatchView | Callable[..., Any] | Name = "auto",
        normalize: bool = True,
        image_size: int | None = None,
        max_train_images: int | None = None,
        max_test_images: int | None = None,
        predict_root: str | None = None,
    ) -> None:
        super().__init__()
        self.root = root
        self.predict_root = predict_root
        self.download = download
        self.num_clients = _at_least_one("num_clients", num_clients)
        self.num_labels: int | Literal["all"] = _num_labels(num_labels)
        self.label_location: Literal["server", "clients"] = label_location
        self.partition = Iid() if partition is None else partition
        self.server_batch_size = _at_least_one("server_batch_size", server_batch_size)
        self.client_batch_size = _at_least_one("client_batch_size", client_batch_size)
        self.validation = _validation(validation)
        self.eval_batch_size = _at_least_one("eval_batch_size", eval_batch_size)
        self.weak = weak
        self.strong = strong
        self.normalize = normalize
        self.image_size = _none_or_at_least_one("image_size", image_size)
        self.max_train_images = _none_or_at_least_one("max_train_images", max_train_images)
        self.max_test_images = _none_or_at_least_one("max_test_images", max_test_images)
        _one_of("label_location", label_location, _LABEL_LOCATIONS)
        for key, view, choices in (("weak", weak, _WEAK), ("strong", strong, _STRONG)):
            if isinstance(view, str):
                _one_of(key, view, choices)
        self.source = dataset if isinstance(dataset, DataSource) else None
        self.spec = self._describe(dataset)
        if self.source is not None:
            self._make_views()  # refuses names that do not fit before anything is set up

    @classmethod
    def from_datasets(  # type: ignore[override]
        cls,
        train: Dataset[Any],
        test: Dataset[Any],
        *,
        weak: str | Callable[..., Any],
        strong: str | Callable[..., Any],
        client_ids: Sequence[Any] | None = None,
        test_client_ids: Sequence[Any] | None = None,
        class_names: Sequence[str] | None = None,
        **rest: Any,
    ) -> FederatedDataModule:
        """A federation of PyTorch data sets that give ``(sample, label)``.

        With ``client_ids``, the partition is :class:`~lightning_fedssl.data.partition.natural.NaturalClients` and
        ``num_clients`` the number of identifiers, unless they are given.

        Args:
            train: Training samples.
            test: Test samples.
            weak: Weak view: a name, none, or a function; see :mod:`lightning_fedssl.data.augment.custom`.
            strong: Strong view, likewise.
            client_ids: For every training sample the identifier of its client.
            test_client_ids: For every test sample the identifier of its client.
            class_names: Names of the classes, in the order of the labels.
            rest: Further arguments of the data module.
        """
        source = Datasets(train, test, client_ids, test_client_ids, class_names)
        if client_ids is not None:
            rest = {"partition": NaturalClients(), "num_clients": len({*map(str, client_ids)}), **rest}
        return cls(source, weak=weak, strong=strong, **rest)

    def _describe(self, dataset: DataSource | str) -> datasets.DatasetSpec:
        if isinstance(dataset, DataSource):
            if self.image_size is not None:
                raise ValueError("data.image_size is for image_folder; leave it out")
            return dataset.load().spec
        return datasets.describe(dataset, self.root, self.image_size)

    @property
    def num_classes(self) -> int:
        """Number of classes; known before :meth:`setup`."""
        return self.spec.num_classes

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of a sample, of an image its channels, height and width; known before :meth:`setup`."""
        return self.spec.in_shape

    @property
    def has_validation(self) -> bool:
        """Whether there are images to validate on."""
        return self.validation != 0

    def prepare_data(self) -> None:
        """Downloads what is missing, if ``download`` is set."""
        if self.download:
            self._load()

    def setup(self, stage: str | None = None) -> None:
        """Loads the data set, holds out the validation images and draws the partition; a second call does nothing.

        Args:
            stage: Not used: every stage needs the same.

        Raises:
            FileNotFoundError: If the data set's files are missing or damaged.
            ValueError: If the setting does not fit the data set; the message names the key.
        """
        seed = sampling.global_seed()
        if getattr(self, "seed", None) == seed:
            return
        self.spec, train, test = self._load()
        self._train, test = (self._checked(split) for split in (train, test))
        self._test = self._limit_test(test, seed)
        self._validation, available = self._hold_out(self._train.labels, seed)
        asked = SplitRequest(
            available, self.num_classes, self.num_clients, self.num_labels, self.label_location, seed,
            self._train.client_ids,
        )  # fmt: skip
        self.split = self.partition.split(asked, sampling.rng(seed, "partition"))
        self.statistics = statistics(self.split, self._train.labels, self.num_classes)
        self.views = self._make_views()
        self._check_views()
        self._double_views: Views | None = None
        self._index_parties()
        outside = available >= 0
        outside[self.split.server_labeled] = False
        self._outside_server = outside.nonzero().flatten()
        self.seed = seed

    def to(self, device: torch.device | str) -> None:
        """Moves the images and all indices to a device, once.

        Args:
            device: Where training and evaluation will run.
        """
        device = torch.device(device)
        self._train, self._test = self._train.to(device), self._test.to(device)
        self._validation = self._validation.to(device)
        self._pool = self._pool.to(device)
        self._outside_server = self._outside_server.to(device)
        self._labeled = _move_all(self._labeled, device)
        self._unlabeled = _move_all(self._unlabeled, device)
        self._labels = _move_all(self._labels, device)

    def local_data(self, party: int, round_index: int, dtype: torch.dtype = torch.float32) -> LocalData:
        """What one party may see in one round.

        Args:
            party: A client's number, or :data:`lightning_fedssl.sampling.SERVER`.
            round_index: The round, from 1.
            dtype: The floating type of its views.
        """
        # The server's number is -1, and its entry the last one.
        return LocalData(
            party=party,
            round=round_index,
            seed=self.seed,
            images=self._train.images,
            labeled=self._labeled[party],
            labels=self._labels[party],
            unlabeled=self._unlabeled[party],
            batch_size=self.server_batch_size if party == sampling.SERVER else self.client_batch_size,
            views=self._views_in(dtype),
            dtype=dtype,
        )

    def evaluation_batches(
        self, stage: Literal["validate", "test"], dtype: torch.dtype = torch.float32, shard: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches ``(images, labels)`` of plain views, in data-set order.

        Args:
            stage: ``"validate"`` for the validation images, ``"test"`` for the test images.
            dtype: The floating type of the images.
            shard: ``(rank, ranks)``: the batches rank, rank + ranks, .. only; together the ranks see every image once.
        """
        rank, ranks = shard
        held_out = stage == "validate" and self.validation != "test"
        source = self._train if held_out else self._test
        indices = self._validation if held_out else torch.arange(len(source.labels), device=source.labels.device)
        no_keys = indices[:0]
        for batch in torch.split(indices, self.eval_batch_size)[rank::ranks]:
            if len(batch):
                yield self._views_in(dtype).plain(source.images[batch], no_keys).to(dtype), source.labels[batch]

    def predict_files(self) -> list[str]:
        """Paths of the images to predict, relative to ``predict_root``; none if they are the test images.

        Raises:
            FileNotFoundError: If there is no such folder, or no image in it.
        """
        if self.predict_root is None:
            return []
        root = Path(self.predict_root)
        return [path.relative_to(root).as_posix() for path in datasets.image_files(root)]

    def predict_batches(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of plain views of the images to predict, and their labels; -1 for new images, which have none.

        The files are read as the data set's images are: resized to cover the network's size, cropped to their centre.

        Args:
            dtype: The floating type of the images.
        """
        if self.predict_root is None:
            yield from self.evaluation_batches("test", dtype)
        device, files = self.test_labels.device, self.predict_files()
        for start in range(0, len(files), self.eval_batch_size):
            paths = [Path(self.predict_root or "", name) for name in files[start : start + self.eval_batch_size]]
            images = torch.stack([datasets.read_image(path, self.in_shape, "data.predict_root") for path in paths]).to(
                device
            )
            labels = torch.full((len(paths),), -1, device=device)
            yield self.views.plain(images, labels[:0]).to(dtype), labels

    @property
    def test_labels(self) -> Tensor:
        """Labels of the test images, ``(images,)``."""
        return self._test.labels

    def test_batch(self, indices: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Plain views and labels of some test images.

        Args:
            indices: ``(n,)``.
            dtype: The floating type of the views.
        """
        indices = indices.to(self._test.labels.device)
        return self.views.plain(self._test.images[indices], indices[:0]).to(dtype), self._test.labels[indices]

    def client_test_indices(self, client: int) -> Tensor | None:
        """Indices of a client's own test images among all test images; None if clients have none of their own.

        They have some where the data have client identifiers and the partition is ``NaturalClients``.

        Args:
            client: The client's number.
        """
        owners = self._test.client_ids
        if owners is None or not isinstance(self.partition, NaturalClients):
            return None
        return (owners == client).nonzero().flatten()

    def true_labels(self, indices: Tensor) -> Tensor:
        """True labels of training images: for diagnostics only, never given to an algorithm.

        Args:
            indices: ``(n,)``.

        Returns:
            ``(n,)`` int64.
        """
        return self._train.labels[indices]

    def unlabeled_pool(self) -> Tensor:
        """Indices of all clients' images, in data-set order: what a pass over all clients' images reads.

        Labels play no part: where clients hold labelled images, those are among them.
        """
        return self._pool

    def images_outside_the_server(self) -> Tensor:
        """Indices of all images of the federation but the server's, in data-set order.

        The clients' images, and those that the partition assigns to no client: the remainder of equal parts.
        """
        return self._outside_server

    def _checked(self, split: ImageSplit) -> ImageSplit:
        """The split, if a data module of the user's gave what it has to."""
        name = self.spec.name
        if not self.spec.pixels:
            return split
        images = datasets.check_images(split.images, name)
        return ImageSplit(images, datasets.check_labels(split.labels, self.num_classes, name), split.client_ids)

    def _load(self) -> tuple[datasets.DatasetSpec, ImageSplit, ImageSplit]:
        if self.source is not None:
            return self.source.load()
        return datasets.load(self.spec.name, self.root, self.download, self.image_size)

    def _limit_test(self, test: ImageSplit, seed: int) -> ImageSplit:
        if self.max_test_images is None or self.max_test_images >= len(test.labels):
            return test
        generator = sampling.rng(seed, "max_test_images")
        kept = choose_balanced(test.labels, self.max_test_images, self.num_classes, generator)
        return ImageSplit(
            test.images[kept], test.labels[kept], None if test.client_ids is None else test.client_ids[kept]
        )

    def _hold_out(self, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The validation images' indices, and the labels with -1 for every image that the federation does not get."""
        used = torch.arange(len(labels))
        if self.max_train_images is not None and self.max_train_images < len(labels):
            generator = sampling.rng(seed, "max_train_images")
            used = choose_balanced(labels, self.max_train_images, self.num_classes, generator)
        held_out = used[self._choose_validation(labels[used], seed)]
        available = torch.full_like(labels, -1)
        available[used] = labels[used]
        available[held_out] = -1
        return held_out, available

    def _choose_validation(self, labels: Tensor, seed: int) -> Tensor:
        if self.validation == "test" or self.validation == 0:
            return torch.zeros(0, dtype=torch.int64)
        count = round(self.validation * len(labels))
        if not 0 < count < len(labels):
            raise ValueError(
                f"data.validation: {self.validation} of {len(labels)} training images would hold out {count}; "
                "it must leave at least one image on both sides"
            )
        return choose_stratified(labels, count, self.num_classes, sampling.rng(seed, "validation"))

    def _views_in(self, dtype: torch.dtype) -> Views:
        """The views that compute in a floating type: 64-bit ones for 64-bit training, else 32-bit ones."""
        if dtype != torch.float64:
            return self.views
        self._double_views = self._double_views or self._make_views(torch.float64)
        return self._double_views

    def _make_views(self, dtype: torch.dtype = torch.float32) -> Views:
        channels = self.spec.in_shape[0]
        raw = replace(self.spec, mean=(0.0,) * channels, std=(1.0,) * channels)
        return views_of(self.spec if self.normalize else raw, self.weak, self.strong, dtype)

    def _check_views(self) -> None:
        for key, view in (("weak", self.weak), ("strong", self.strong)):
            if not isinstance(view, str):
                check_view(getattr(self.views, key), self._train.images[:3], f"data.{key}")

    def _index_parties(self) -> None:
        """Every party's index tensors: the clients' in their order, then the server's."""
        server = self.split.server_labeled
        self._labeled = [*(client.labeled for client in self.split.clients), server]
        self._unlabeled = [*(client.unlabeled for client in self.split.clients), server[:0]]
        self._labels = [self._train.labels[labeled] for labeled in self._labeled]
        self._pool = torch.cat([indices for client in self.split.clients for indices in client]).sort().values


def require_federated(datamodule: object) -> None:
    """Refuses what is no federated data module.

    Args:
        datamodule: What a trainer was given.

    Raises:
        TypeError: With the way to adapt a data module of Lightning's.
    """
    if not isinstance(datamodule, FederatedDataModule):
        raise TypeError(
            f"FederatedTrainer needs a FederatedDataModule, not {type(datamodule).__name__}. A Lightning data module "
            "is adapted by FederatedDataModule(FromLightning(datamodule), weak=..., strong=..., num_clients=...)"
        )


def _move_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """One transfer for all: thousands of clients' small tensors would cost a transfer each."""
    return list(torch.split(torch.cat(list(tensors)).to(device), [len(tensor) for tensor in tensors]))


def _at_least_one(key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"data.{key} must be a whole number of at least 1, got {value!r}")
    return value


def _none_or_at_least_one(key: str, value: int | None) -> int | None:
    return None if value is None else _at_least_one(key, value)


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"data.{key} must be one of {', '.join(choices)}; got {value!r}")


def _num_labels(value: int | Literal["all"]) -> int | Literal["all"]:
    if value == "all":
        return "all"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'data.num_labels must be a whole number of at least 1, or "all"; got {value!r}')
    return value


def _validation(value: float | Literal["test"]) -> float | Literal["test"]:
    if value == "test":
        return "test"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f'data.validation must be a fraction from 0 to below 1, or "test"; got {value!r}')
    return float(value)
