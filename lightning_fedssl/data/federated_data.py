"""The data of a simulated federation: one data set, its partition, and batches for evaluation.

Nothing here imports Lightning, so that ``partition`` draws a partition without waiting for it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data import datasets, image_files, settings
from lightning_fedssl.data.augment.custom import BatchView, check_view, views_of
from lightning_fedssl.data.datasets import ImageSplit
from lightning_fedssl.data.equal_samples import count_equal
from lightning_fedssl.data.held_out import choose_rows, limit_test
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.data.mapped_images import MappedImages
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.natural import NaturalClients
from lightning_fedssl.data.partition.statistics import PartitionStatistics, statistics
from lightning_fedssl.data.party_indices import PartyIndices
from lightning_fedssl.data.sources import DataSource, FromLightning, LightningData, LoadedData, examples
from lightning_fedssl.data.sources.base import check_loaded

if TYPE_CHECKING:
    Name = str
else:
    try:
        from jsonargparse.typing import restricted_string_type
    except ImportError:  # benchmarks run without the command line's library
        Name = str
    else:  # an error in the arguments of a class, {class_path: ...}, must not be parsed as a name
        Name = restricted_string_type("Name", r"^[^{].*$")

_log = logging.getLogger(__name__)

_HASHED_AT_ONCE = 1024
"""Samples of which bytes are copied at a time."""

_LABEL_LOCATIONS = ("server", "clients")
_WEAK = ("auto", "flip_crop", "crop", "none")
_STRONG = ("auto", "fixmatch", "semifl", "fedmatch", "digits", "none")


_OF_SETUP = (
    "source", "root", "num_clients", "num_labels", "label_location", "partition", "validation", "weak", "strong",
    "normalize", "image_size", "max_train_images", "max_test_images",
)  # fmt: skip
"""The attributes that decide what :meth:`FederatedData.setup` loads and draws."""


class FederatedData:
    """A data set assigned to a server and many clients.

    The samples live on the device, images as uint8; every party's data is a list of indices into them. The partition
    is a function of ``seed_everything`` and of the keys here, and of nothing else, so all methods run on the same one.

    Args:
        dataset: Name of the data set: digits, mnist, fashion_mnist, emnist (balanced), cifar10, cifar100, svhn, stl10,
            or image_folder for your own (case, hyphens and underscores do not count); or a source of data by class:
            Datasets, Arrays, ImageTable, SiteFolders, HuggingFace, BreastCancer, Signals, or a class of your own
            derived from DataSource; or a Lightning data module.
        root: The data folder, as torchvision lays it out; for image_folder it holds train/<class>/, test/<class>/ and,
            if there are images for validation or without labels, validation/<class>/ (or val/<class>/) and unlabeled/.
        download: Let torchvision download missing files.
        num_clients: Number of clients, M.
        num_labels: Number of labelled images in the whole federation, N_s, balanced over the classes; or all.
        label_location: Where the labelled images are: at the ``server``, or at the ``clients``.
        partition: How the images are assigned: Iid (default), Shards, Dirichlet, FromFile, ... (lightning-fedssl
            partitions lists all), or a class of your own.
        server_batch_size: Images per step at the server.
        client_batch_size: Images per local step at a client.
        validation: Fraction of the training images that is held out, with labels and stratified by class, before the
            federation is made, in [0, 1); 0 for no validation. The word test uses the test images instead, as many
            papers do: then the best round is chosen on the images that are reported. A fraction above 0 uses the
            validation images of the data's own source, if it has some.
        eval_batch_size: Images per batch in evaluation.
        weak: Weak augmentation: auto (the data set's usual one), flip_crop, crop, none, or a function of a batch and
            keys (docs/data.md).
        strong: Strong augmentation: auto, fixmatch, semifl, fedmatch, digits, none (the weak one), or a function.
        normalize: Shift and scale the pixels by the data set's mean and standard deviation; without, they are 0 to 1.
        image_size: Side of the images in pixels; for image_folder only, and needed there.
        max_train_images: Use at most this many training images, balanced over the classes, for a quick trial.
        max_test_images: Use at most this many test images, balanced over the classes, for a quick trial.
        predict_root: A folder of new images for ``predict``, with any folders below it; the test images if left out.
            Only where the samples of the data set are 8-bit pixels.
        cache_dir: A folder for image files that are too many for memory: each is decoded once, and the images are read
            from a memory-mapped file; for image_folder, ImageTable and SiteFolders.

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
    _own_validation: ImageSplit | None
    _validation: Tensor
    _parties: PartyIndices

    def __init__(
        self,
        dataset: DataSource | LightningData | Name = "digits",
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
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()  # a data module's other base class has a constructor, too
        self.root = root
        self.predict_root = predict_root
        self.download = download
        self.num_clients = settings.at_least_one("num_clients", num_clients)
        self.num_labels: int | Literal["all"] = settings.num_labels(num_labels)
        self.label_location: Literal["server", "clients"] = label_location
        self.partition = settings.partition(partition)
        self.server_batch_size = settings.at_least_one("server_batch_size", server_batch_size)
        self.client_batch_size = settings.at_least_one("client_batch_size", client_batch_size)
        self.validation = settings.validation(validation)
        self.eval_batch_size = settings.at_least_one("eval_batch_size", eval_batch_size)
        self.weak = weak
        self.strong = strong
        self.normalize = normalize
        self.image_size = settings.none_or_at_least_one("image_size", image_size)
        self.max_train_images = settings.none_or_at_least_one("max_train_images", max_train_images)
        self.max_test_images = settings.none_or_at_least_one("max_test_images", max_test_images)
        settings.one_of("label_location", label_location, _LABEL_LOCATIONS)
        for key, view, choices in (("weak", weak, _WEAK), ("strong", strong, _STRONG)):
            if isinstance(view, str):
                settings.one_of(key, view, choices)
        self.cache_dir = cache_dir
        self.source = self._source_of(dataset)
        self.spec = self._describe(dataset)
        self._check_predict_root()
        if self.source is not None:
            self._make_views()  # refuses wrong names before anything is set up

    def _source_of(self, dataset: DataSource | LightningData | str) -> DataSource | None:
        """The source of data that is given by class; None for a name."""
        if isinstance(dataset, FederatedData):
            raise TypeError("data.dataset is a FederatedDataModule already; give it to the trainer itself")
        source = FromLightning(dataset) if isinstance(dataset, LightningData) else dataset
        if isinstance(source, DataSource):
            if self.image_size is not None:
                raise ValueError("data.image_size is for image_folder; leave it out")
            source.cache_dir = self.cache_dir
            self._check_cache(type(source).__name__, source.decodes_images)
            return source
        self._check_cache(source, datasets.canonical_name(source) == "image_folder")
        return None

    def _check_cache(self, name: str, decodes_images: bool) -> None:
        if self.cache_dir is not None and not decodes_images:
            raise ValueError(
                f"data.cache_dir: {name} is held in memory; leave it out (it is for image_folder, ImageTable and "
                "SiteFolders)"
            )

    def _check_predict_root(self) -> None:
        if self.predict_root is not None and not self.spec.pixels:
            raise ValueError(
                "data.predict_root: the model was trained on numbers that are no 8-bit pixels, and image files hold "
                "pixels from 0 to 255; leave it out, and give data.dataset the new samples as its test samples, "
                "prepared as the training samples are, with any labels, such as 0"
            )

    def _describe(self, dataset: DataSource | LightningData | str) -> datasets.DatasetSpec:
        if self.source is not None:
            return self.source.describe()
        return datasets.describe(str(dataset), self.root, self.image_size)

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

    def clients_without_images(self) -> list[int]:
        """The clients that hold no image; known after :meth:`setup`."""
        empty: list[int] = (self.statistics.sizes == 0).nonzero().flatten().tolist()
        return empty

    def prepare_data(self) -> None:
        """Downloads what is missing, if ``download`` is set."""
        if self.download:
            self._load()

    def setup(self, stage: str | None = None) -> None:
        """Loads the data set, holds out the validation images and draws the partition.

        A second call does nothing, unless the seed or an attribute that it depends on was set to another value.

        Args:
            stage: Not used: every stage needs the same.

        Raises:
            FileNotFoundError: If the data set's files are missing or damaged.
            ValueError: If the setting does not fit the data set; the message names the key.
        """
        seed = sampling.global_seed()
        wanted = {"seed": seed, **{name: getattr(self, name) for name in _OF_SETUP}}
        if getattr(self, "_set_up_with", None) == wanted:
            return
        loaded = LoadedData(*self._load())
        self.spec = loaded.spec
        if self.num_classes < 2:
            names = ", ".join(self.spec.class_names)
            raise ValueError(f"data.dataset: the training {self.spec.noun}s have one class ({names}); two are needed")
        self._train, test = self._checked(loaded.train, may_lack_labels=True), self._checked(loaded.test)
        self._test = limit_test(test, self.max_test_images, self.num_classes, seed)
        self._own_validation = self._validation_of(loaded)
        self._warn_of_empty_classes()
        self._warn_of_equal_samples()
        self._content_hashes: dict[str, str] | None = None
        self._partition(seed)
        self.views = self._make_views()
        self._check_views()
        self._double_views: Views | None = None
        self.seed = seed
        self._set_up_with = wanted

    def _partition(self, seed: int) -> None:
        """Holds out the validation images, and assigns the others to server and clients."""
        fraction = 0.0 if self._own_validation is not None else self.validation
        labels, clients = self._train.labels, self._train.client_ids
        rows = choose_rows(labels, self.num_classes, seed, fraction, self.max_train_images)
        self._validation = rows.validation
        asked = SplitRequest(
            rows.available, self.num_classes, self.num_clients, self.num_labels, self.label_location, seed, clients,
            rows.without_label,
        )  # fmt: skip
        split = self._draw(asked)
        self.split = split
        self.statistics = statistics(split, labels, self.num_classes, self.spec.noun)
        used = rows.available >= 0
        used[rows.without_label] = True
        self._parties = PartyIndices.of(split, labels, used)

    def _draw(self, asked: SplitRequest) -> FederatedSplit:
        """The partition's split, checked; the error of a rule of the user's own names the rule."""
        rule = self.partition
        try:
            split = rule.split(asked, sampling.rng(asked.seed, "partition"))
            if len(asked.without_label):
                split = rule.add_unlabeled(split, asked, sampling.rng(asked.seed, "partition", "without label"))
            rule.check(split, asked)
        except (ValueError, OSError):
            raise
        except Exception as error:
            if type(rule).__module__.startswith("lightning_fedssl."):
                raise
            raise ValueError(
                f"data.partition: {type(rule).__name__} raised {type(error).__name__}: {error}; FEDSSL_TRACEBACK=1 "
                "shows the line"
            ) from error
        return split

    def to(self, device: torch.device | str) -> None:
        """Moves the images and all indices to a device, once; images of ``cache_dir`` stay in their file.

        Args:
            device: Where training and evaluation will run.
        """
        device = torch.device(device)
        self._train, self._test = self._train.to(device), self._test.to(device)
        if self._own_validation is not None:
            self._own_validation = self._own_validation.to(device)
        self._validation = self._validation.to(device)
        self._parties = self._parties.to(device)

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
            labeled=self._parties.labeled[party],
            labels=self._parties.labels[party],
            unlabeled=self._parties.unlabeled[party],
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
        source, indices = self._evaluated(stage)
        no_keys = indices[:0]
        for batch in torch.split(indices, self.eval_batch_size)[rank::ranks]:
            if len(batch):
                yield self._views_in(dtype).plain(source.images[batch], no_keys).to(dtype), source.labels[batch]

    def _evaluated(self, stage: Literal["validate", "test"]) -> tuple[ImageSplit, Tensor]:
        """The images that a stage evaluates: a split, and indices into it."""
        if stage == "validate" and self.validation != "test" and self._own_validation is None:
            return self._train, self._validation
        own = self._own_validation if stage == "validate" else None
        source = self._test if own is None else own
        return source, torch.arange(len(source.labels), device=source.labels.device)

    def predict_files(self) -> list[str]:
        """Paths of the images to predict, relative to their folder; none for test images that are no known files.

        Raises:
            FileNotFoundError: If there is no such folder, or no image in it.
            ValueError: If the samples of the data set are no 8-bit pixels.
        """
        if self.predict_root is None:
            return list(self._test.files)
        self._check_predict_root()  # again: in Python, the attribute may be set after a fit
        root = Path(self.predict_root)
        return [path.relative_to(root).as_posix() for path in image_files.image_files(root)]

    def predict_batches(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of plain views of the images to predict, and their labels; -1 for new images, which have none.

        The files are read as the data set's images are: resized to cover the network's size, cropped to their centre.

        Args:
            dtype: The floating type of the images.
        """
        if self.predict_root is None:
            yield from self.evaluation_batches("test", dtype)
            return
        device, files = self.test_labels.device, self.predict_files()
        for start in range(0, len(files), self.eval_batch_size):
            paths = [Path(self.predict_root or "", name) for name in files[start : start + self.eval_batch_size]]
            images = torch.stack(
                [image_files.read_image(path, self.in_shape, "data.predict_root") for path in paths]
            ).to(device)
            labels = torch.full((len(paths),), -1, device=device)
            yield self._views_in(dtype).plain(images, labels[:0]).to(dtype), labels

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
        plain = self._views_in(dtype).plain(self._test.images[indices], indices[:0])
        return plain.to(dtype), self._test.labels[indices]

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
        """True labels of training images, -1 where nobody knows one: for diagnostics, never given to an algorithm.

        Args:
            indices: ``(n,)``.

        Returns:
            ``(n,)`` int64.
        """
        return self._train.labels[indices]

    def own_data_hash(self) -> str:
        """SHA-256 over all samples and labels of data of the user's own; empty for a data set of a fixed content."""
        if not self._is_own:
            return ""
        return _sha256(part for split in self._splits() for part in _bytes_of(split))

    def content_hashes(self) -> dict[str, str]:
        """SHA-256 over data of the user's own, computed once; none for a data set of a fixed content.

        ``labels_sha256`` is over the labels. ``samples_sha256`` is :meth:`own_data_hash` of samples in memory, and
        ``images_sha256`` is over images in ``cache_dir``, whose own hashes are kept there: large files take long.
        """
        if not self._is_own:
            return {}
        if self._content_hashes is None:
            splits = self._splits()
            found = {"labels_sha256": _sha256(split.labels.cpu().numpy().tobytes() for split in splits)}
            samples: list[Any] = [split.images for split in splits]  # some may be MappedImages
            if all(isinstance(images, Tensor) for images in samples):
                found["samples_sha256"] = self.own_data_hash()
            elif cached := [images for images in samples if isinstance(images, MappedImages)]:
                found["images_sha256"] = _sha256(images.content_hash().encode() for images in cached)
            self._content_hashes = found
        return self._content_hashes

    @property
    def _is_own(self) -> bool:
        """Whether the data are the user's own: no data set of a fixed content."""
        return self.source is not None or self.spec.name == "image_folder"

    def _splits(self) -> list[ImageSplit]:
        """The samples for training and testing and, if the source has some, for validation."""
        return [split for split in (self._train, self._test, self._own_validation) if split is not None]

    @property
    def has_unknown_labels(self) -> bool:
        """Whether clients hold images whose true label nobody knows."""
        return self.statistics.unknown_counts is not None

    def unlabeled_pool(self) -> Tensor:
        """Indices of all clients' images, in data-set order: what a pass over all clients' images reads.

        Labels play no part: where clients hold labelled images, those are among them.
        """
        return self._parties.pool

    def images_outside_the_server(self) -> Tensor:
        """Indices of all images of the federation but the server's, in data-set order.

        The clients' images, and those that the partition assigns to no client: the remainder of equal parts.
        """
        return self._parties.outside_server

    def _validation_of(self, loaded: LoadedData) -> ImageSplit | None:
        """The source's own validation images, if ``data.validation`` is a fraction above 0."""
        if loaded.validation is None or self.validation in ("test", 0):
            return None
        return self._checked(loaded.validation)

    def _checked(self, split: ImageSplit, may_lack_labels: bool = False) -> ImageSplit:
        """The split, after a check that a source of the user's gave usable images and labels; -1 is no label."""
        name = self.spec.name if self.source is None else type(self.source).__name__
        images = datasets.check_images(split.images, name) if self.spec.pixels else split.images
        labeled = split.labels[split.labels != -1] if may_lack_labels else split.labels
        datasets.check_labels(labeled, self.num_classes, name)
        return replace(split, images=images, labels=split.labels.to(torch.int64))

    def _warn_of_empty_classes(self) -> None:
        """Name classes without a training sample: one usually is a label that does not occur by mistake."""
        labels = self._train.labels
        counts = labels[labels >= 0].bincount(minlength=self.num_classes)
        empty = [f"{label} ({self.spec.class_names[label]})" for label in (counts == 0).nonzero().flatten().tolist()]
        if empty:
            _log.warning(
                "data.dataset %s: no training %s has the label %s; labels count from 0: subtract 1 if yours do not",
                self.spec.name, self.spec.noun, ", ".join(empty[:5]) + (" and others" if len(empty) > 5 else ""),
            )  # fmt: skip

    def _warn_of_equal_samples(self) -> None:
        """Say how many test samples of the user's own data equal a training sample; rows of small tables may do so."""
        comes_with_the_package = type(self.source).__module__ == examples.__name__
        if self._is_own and not comes_with_the_package and (count := count_equal(self._train, self._test)):
            _log.warning(
                "data.dataset %s: %d of %d test %ss equal a training %s: if they are the same %ss, test accuracies are "
                "too high; then remove them from one of the two",
                self.spec.name, count, len(self._test.labels), *[self.spec.noun] * 3,
            )  # fmt: skip

    def _load(self) -> tuple[Any, ...]:
        """Specification, training and test split and, if there are some, validation images."""
        if self.source is not None:
            return check_loaded(self.source.load(), type(self.source).__name__)
        parts = datasets.load(self.spec.name, self.root, self.download, self.image_size, self.cache_dir)
        if self.spec.name != "image_folder" or self.validation in ("test", 0):
            return parts
        return *parts, datasets.load_validation(self.root, self.spec, self.cache_dir)

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


def _bytes_of(split: ImageSplit) -> Iterator[bytes]:
    """The labels, then the samples, some at a time."""
    yield split.labels.cpu().numpy().tobytes()
    for start in range(0, len(split.labels), _HASHED_AT_ONCE):
        yield split.images[start : start + _HASHED_AT_ONCE].cpu().contiguous().numpy().tobytes()


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
