"""The data of a simulated federation: one data set, its partition, and batches for evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedssl import sampling
from lightning_fedssl.data import datasets, image_files
from lightning_fedssl.data.augment.custom import BatchView
from lightning_fedssl.data.class_shares import ROUGH, ClassShares, SiteShares, true_counts
from lightning_fedssl.data.datasets import ImageSplit, hash_of
from lightning_fedssl.data.evaluated import Evaluated, new_batches, new_files
from lightning_fedssl.data.held_out import TrainingRows, choose_rows, limit_test
from lightning_fedssl.data.inputs import Inputs
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.base import Iid, Partition
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.natural import NaturalClients
from lightning_fedssl.data.partition.statistics import statistics
from lightning_fedssl.data.settings import check_inputs, check_values, source_of
from lightning_fedssl.data.sources.arrays import Datasets
from lightning_fedssl.data.sources.base import DataSource, LoadedData, check_loaded, measure
from lightning_fedssl.data.sources.reading import Reading
from lightning_fedssl.models.backbones import Backbone
from lightning_fedssl.storage.other_names import NamesKeys
from lightning_fedssl.task import Classification, Task

_OF_SETUP = (
    "source",
    "task",
    "root",
    "num_clients",
    "num_labels",
    "label_location",
    "partition",
    "validation",
    "weak",
    "strong",
    "backbone",
    "normalize",
    "max_train_images",
    "max_test_images",
    "class_shares",
)
"""The attributes that decide what :meth:`FederatedDataModule.setup` loads and draws."""

_ON_DEVICE = (
    "_train",
    "_test",
    "_own_validation",
    "_validation",
    "_clients",
    "_server",
    "_pool",
    "_outside_server",
)
"""What :meth:`FederatedDataModule.to` moves."""

Samples = Dataset[Any] | Sequence[Any]
"""A data set of pairs, or a tuple of tensors or arrays: ``(samples, labels)``, or ``(samples,)``
without labels."""


class FederatedDataModule(LightningDataModule, metaclass=NamesKeys):
    """A data set assigned to a server and many clients.

    The samples live on the device, images as uint8; every party's data is a list of indices into
    them. The partition is a function of ``seed_everything`` and of the keys here, and of nothing
    else, so all methods run on the same one.

    Args:
        dataset: Name of the data set: digits, mnist, fashion_mnist, emnist (balanced), cifar10,
            cifar100, svhn, stl10, or image_folder for your own (case, hyphens and underscores do
            not count); or an existing file, an .npz file for Arrays, a .csv file for Table, or with
            image_size for ImageTable; or a source of data by class: Datasets, Arrays, Table,
            ImageTable, SiteFolders, BreastCancer, Signals, or a class of your own derived from
            DataSource; or a Lightning data module.
        task: What is predicted: Classification (default), MultiLabel, Segmentation, Regression, or
            a class of your own derived from Task.
        root: The data folder, as torchvision lays it out; for image_folder it holds train/<class>/,
            test/<class>/ and, if there are images for validation or without labels,
            validation/<class>/ (or val/<class>/) and unlabeled/.
        download: Let torchvision download missing files.
        num_clients: Number of clients, M.
        num_labels: Number of labelled images in the whole federation, N_s, balanced over the
            classes; or all.
        label_location: Where the labelled images are: at the ``server``, or at the ``clients``.
        partition: How the images are assigned: Iid (default), Shards, Dirichlet, FromFile, ...
            (lightning-fedssl partitions lists all), or a class of your own.
        server_batch_size: Images per step at the server.
        client_batch_size: Images per local step at a client.
        validation: Fraction of the training images that is held out, with labels and stratified by
            class, before the federation is made, in [0, 1); 0 for no validation. The word test uses
            the test images instead, as many papers do: then the best round is chosen on the images
            that are reported. A fraction above 0 uses the validation images of the data's own
            source, if it has some.
        eval_batch_size: Images per batch in evaluation.
        weak: Weak augmentation: auto (the data set's usual one), flip_crop, crop,
            none, or a function of a batch and keys (docs/data.md). Data of your own have no usual
            one.
        strong: Strong augmentation: auto, fixmatch, semifl, fedmatch, digits, none (the weak one),
            or a function.
        backbone: A frozen network whose features take the place of the samples, computed once for
            all parties, of the plain view and of two weak and two strong views: TimmBackbone,
            RandomKernels, or any callable from a float batch ``(n, ...)`` to features ``(n, d)``.
        normalize: Shift and scale the pixels (with a backbone the features) by the data set's mean
            and standard deviation; without, pixels are 0 to 1. Or the mean and the deviation of
            each channel that a pretrained network was trained with: ``{mean: [...], std: [...]}``,
            for pixels from 0 to 1.
        image_size: Side of the images in pixels; for image_folder and a .csv file of images only,
            and needed there, unless the backbone has a size.
        max_train_images: Use at most this many training images, balanced over the classes, for a
            quick trial.
        max_test_images: Use at most this many test images, balanced over the classes, for a quick
            trial.
        predict_root: A folder of new images for ``predict``, with any folders below it; the test
            images if left out. Only where the samples of the data set are 8-bit pixels.
        cache_dir: A folder for features of a backbone, which later runs on the same samples read;
            and for image files that are too many for memory: each is decoded once, and the images
            are read from a memory-mapped file; for image_folder, ImageTable and SiteFolders. On a
            GPU they are in its memory.
        class_shares: How frequent the classes are at the sites
            (:class:`~lightning_fedssl.data.class_shares.ClassShares`): a mapping from classes to
            shares; one from sites to such mappings; a CSV file with the column ``site`` and one for
            each class; or ``{of: sites}``, which takes the true ones of the partition, openly. Only
            for a method that uses them.

    Raises:
        ValueError: If a value is out of range; the message names the key.
        FileNotFoundError: If dataset is image_folder and there are no class folders.

    Example:
        >>> from lightning_fedssl import Dirichlet
        >>> skewed = Dirichlet(0.3)
        >>> data = FederatedDataModule("digits", num_clients=5, num_labels=100, partition=skewed)
        >>> data.setup()
        >>> len(data.split.server_labeled), len(data.split.clients)
        (100, 5)
    """

    def __init__(
        self,
        dataset: DataSource
        | LightningDataModule
        | str
        | Path = "digits",  # with Path, jsonargparse reads no file
        task: Task | None = None,
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
        weak: BatchView | Callable[..., Any] | str = "auto",
        strong: BatchView | Callable[..., Any] | str = "auto",
        backbone: Backbone | Callable[..., Any] | None = None,
        normalize: bool | dict[str, list[float]] = True,
        image_size: int | None = None,
        max_train_images: int | None = None,
        max_test_images: int | None = None,
        predict_root: str | None = None,
        cache_dir: str | None = None,
        class_shares: dict[str, Any] | str | None = None,
    ) -> None:
        super().__init__()
        self.task = task or Classification()
        self.root = root
        self.predict_root = predict_root
        self.download = download
        self.num_clients = num_clients
        self.num_labels: int | Literal["all"] = num_labels
        self.label_location: Literal["server", "clients"] = label_location
        self._mixed = Iid()  # no other object, so that an Iid that is asked for needs no warning
        self.partition = self._mixed if partition is None else partition
        self.server_batch_size = server_batch_size
        self.client_batch_size = client_batch_size
        self.validation = validation
        self.eval_batch_size = eval_batch_size
        self.weak = weak
        self.strong = strong
        self.backbone = backbone
        self.normalize = normalize
        self.image_size = image_size
        self.max_train_images = max_train_images
        self.max_test_images = max_test_images
        self.cache_dir = cache_dir
        self.class_shares = class_shares
        self.shares: dict[int, SiteShares] = {}
        self.stated: ClassShares | None = None
        check_values(vars(self))
        self._use(self._source_of(dataset), str(dataset))

    def _use(self, source: DataSource | None, name: str) -> None:
        """Take a source of data, or a data set by its name; refuse settings that do not fit it."""
        self.source = source
        self.reading = Reading() if source is None else source.reading
        if source is None:
            self.spec = datasets.SPECS[datasets.canonical_name(name)]
        else:
            source.cache_dir = self.cache_dir
            source.task = self.task
            self.spec = source.describe()
        check_inputs(vars(self), self.spec)
        self.inputs = self._make_inputs()

    def _source_of(
        self, dataset: DataSource | LightningDataModule | str | Path
    ) -> DataSource | None:
        """The source of data that is given by class, file or folder; None for a name."""
        return source_of(dataset, self.root, self.image_size, getattr(self.backbone, "size", None))

    def _make_inputs(self) -> Inputs:
        """How the samples of the present specification become inputs of the network."""
        return Inputs(
            self.spec,
            self.weak,
            self.strong,
            self.normalize,
            self.task.per_pixel,
            self.backbone,
            self.cache_dir,
        )

    @classmethod
    def from_datasets(  # type: ignore[override]
        cls,
        train: Samples,
        test: Samples,
        unlabeled: Samples | None = None,
        validation: Samples | float | Literal["test"] | None = None,
        *,
        client_ids: Sequence[Any] | None = None,
        test_client_ids: Sequence[Any] | None = None,
        unlabeled_client_ids: Sequence[Any] | None = None,
        class_names: Sequence[str] | None = None,
        **rest: Any,
    ) -> FederatedDataModule:
        """A federation of PyTorch data sets that give ``(sample, label)``, or of tensors.

        With ``client_ids``, the partition is
        :class:`~lightning_fedssl.data.partition.natural.NaturalClients` and ``num_clients`` the
        number of identifiers, unless they are given.

        A method then takes ``network=functools.partial(MLP, hidden=[32])``: the class with some
        arguments filled in, which the trainer calls with those that follow from the data,
        ``num_classes`` and ``in_shape``; likewise ``optimizer=functools.partial(torch.optim.SGD,
        lr=0.05)``, which it calls with the weights.

        Args:
            train: Training samples: a data set, or ``(samples, labels)``.
            test: Test samples, likewise.
            unlabeled: Samples without labels, which only clients get: a data set, or
                ``(samples,)``.
            validation: Validation samples as ``train``; or a fraction or ``test``, as the argument
                of the data module.
            client_ids: For every training sample the identifier of its client.
            test_client_ids: For every test sample the identifier of its client.
            unlabeled_client_ids: For every sample without a label the identifier of its client.
            class_names: Names of the classes, in the order of the labels.
            rest: Further arguments of the data module. ``weak`` and ``strong`` must be given, each
                none, a name or a function (:mod:`lightning_fedssl.data.augment.custom`), since no
                view fits all data.
        """
        if isinstance(validation, (int, float, str)):
            rest = {"validation": validation, **rest}
            validation = None
        samples: Any = (train, test, unlabeled, validation)
        identifiers: Any = (client_ids, test_client_ids, unlabeled_client_ids, class_names)
        source = Datasets(*samples, *identifiers)
        if any(source.ids[part] is not None for part in ("train", "unlabeled")):
            source.task = rest.get("task") or source.task
            count = len(source.load().spec.client_names)
            rest = {"partition": NaturalClients(), "num_clients": count, **rest}
        return cls(source, **rest)

    @property
    def num_classes(self) -> int:
        """Number of classes; known before :meth:`setup`."""
        return self.spec.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their labels; known before :meth:`setup`."""
        return self.spec.class_names

    @property
    def strata_names(self) -> tuple[str, ...]:
        """The classes by which a partition sees the samples; of a classification its own."""
        return self.task.strata_names(self.class_names)

    def strata(self, split: ImageSplit) -> Tensor:
        """The class of every sample for partition, balance and validation, ``(N,)``."""
        return self.task.strata(split.labels, self.num_classes)

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients where the data have clients of their own and keep them;
        otherwise none.
        """
        return self.spec.client_names if isinstance(self.partition, NaturalClients) else ()

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of a sample, of an image its channels, height and width; known before
        :meth:`setup`.
        """
        return self.spec.in_shape if self.backbone is None else (self.inputs.width,)

    @property
    def has_validation(self) -> bool:
        """Whether there are images to validate on."""
        return self.validation != 0

    def clients_without_images(self) -> list[int]:
        """The clients that hold no image; known after :meth:`setup`."""
        empty = (self.statistics.sizes == 0).nonzero()
        return empty.flatten().tolist()

    def prepare_data(self) -> None:
        """Downloads what is missing, if ``download`` is set."""
        if self.download:
            self._load()

    def setup(self, stage: str | None = None) -> None:
        """Loads the data set, holds out the validation images and draws the partition.

        A second call does nothing, unless the seed or an attribute that it depends on was set to
        another value.

        Args:
            stage: Not used: every stage needs the same.

        Raises:
            FileNotFoundError: If the data set's files are missing or damaged.
            ValueError: If the setting does not fit the data set; the message names the key.
        """
        seed = sampling.global_seed()
        requested = {"seed": seed, **{name: getattr(self, name) for name in _OF_SETUP}}
        if getattr(self, "_set_up_with", None) == requested:
            return
        name = self.spec.name if self.source is None else type(self.source).__name__
        loaded = check_loaded(LoadedData(*self._load()), name, self.task)
        self.spec = loaded.spec
        self._report(loaded)
        self._train = loaded.train
        strata = self.strata(loaded.test)
        self.test_as_read = self._test = limit_test(
            loaded.test, strata, self.max_test_images, len(self.strata_names), seed
        )
        self._own_validation = None if self.validation in ("test", 0) else loaded.validation
        self._own_hash: str | None = None
        rows = choose_rows(
            self.strata(self._train),
            len(self.strata_names),
            seed,
            0.0 if self._own_validation is not None else self.validation,
            self.max_train_images,
        )
        self._validation = rows.validation
        self._partition(seed, rows)
        self.inputs = self._make_inputs()
        self.inputs.check(self._train.images[:3])
        if self.backbone is not None:
            self._replace_by_features()
        self.seed = seed
        self._set_up_with = requested

    def _load(self) -> tuple[Any, ...]:
        """Specification, training and test split and, if there are some, validation images."""
        if self.source is not None:
            return self.source.load()
        return datasets.load(self.spec.name, self.root, self.download)

    def _report(self, loaded: LoadedData) -> None:
        """Completes the report of what was read."""
        _, *splits = loaded
        by_stratum: list[Any] = [
            split and replace(split, labels=self.strata(split)) for split in splits
        ]
        self.reading.inspect(replace(loaded.spec, class_names=self.strata_names), *by_stratum)
        if advice := self.task.advice(loaded.train.labels):
            self.reading.warn(advice)
        if "classes" in self.task.gives:
            classes = self.task.classes_of(loaded.train.labels, self.num_classes)
            self.reading.warn_of_classes(loaded.spec.class_names, classes)
        self.reading.warn_of_names("clients", loaded.spec.client_names)
        if self.source is not None:  # published data are taken as they are
            others = {"test": loaded.test, "validation": loaded.validation}
            self.reading.compare(loaded.train, self.strata(loaded.train) < 0, others)
        if self.backbone is not None and not self.spec.pixels and len(self.spec.in_shape) == 3:
            self.reading.warn(
                "samples of three dimensions are numbers and no pixels, and standardised before "
                "data.backbone: give 8-bit images, or numbers from 0 to 1"
            )

    def _partition(self, seed: int, rows: TrainingRows) -> None:
        """Assigns the images that are not held out to server and clients."""
        clients = self._train.client_ids
        if clients is not None and self.partition is self._mixed:
            count = int(clients.max()) + 1
            rank_zero_warn(
                "data.partition is left out: Iid mixes the samples of the clients that "
                "data.dataset names; give data.partition: NaturalClients with data.num_clients: "
                f"{count}, or data.partition: Iid"
            )
        labels = int((rows.available >= 0).sum())
        if self.source is not None and self.num_labels != "all" and self.num_labels < labels:
            used = f"{self.num_labels} of {labels:,} (data.num_labels: all takes them all)"
            self.reading.facts["labels used"] = used
        request = SplitRequest(
            rows.available,
            len(self.strata_names),
            self.num_clients,
            self.num_labels,
            self.label_location,
            seed,
            clients,
            rows.without_label,
        )
        rule = self.partition
        split = rule.split(request, sampling.rng(seed, "partition"))
        if len(rows.without_label):
            generator = sampling.rng(seed, "partition", "without label")
            split = rule.add_unlabeled(split, request, generator)
        rule.check(split, request)
        self._assign(split, request.in_federation)

    def _assign(self, split: FederatedSplit, used: Tensor) -> None:
        """Takes a partition; ``used`` ``(N,)`` marks the images of the federation."""
        self.split = split
        self.statistics = statistics(
            split,
            self.strata(self._train),
            len(self.strata_names),
            self.spec.noun,
            self.strata_names,
            self.client_names,
        )
        self._clients = split.client_list
        self._server = split.server_labeled
        assigned = [self._clients.labeled.values, self._clients.unlabeled.values]
        self._pool = torch.cat(assigned).sort().values
        self._outside_server = used.index_fill(0, self._server, False).nonzero().flatten()
        self._read_shares()

    @property
    def sureness_of_shares(self) -> float:
        """How sure clients are of their class shares, on average: 0 if they state none."""
        if self.stated is not None and self.stated.of_nodes:
            return ROUGH  # nobody but the nodes knows
        return sum(one.sureness for one in self.shares.values()) / self.num_clients

    def _read_shares(self) -> None:
        """Reads what sites state of their classes."""
        self.shares = {}
        self.stated = None
        if self.class_shares is None:
            return
        if not isinstance(self.task, Classification):
            raise ValueError("data.class_shares is for samples of one class each; leave it out")
        stated = ClassShares(self.class_shares, self.class_names)
        count = partial(true_counts, self._train.labels, self._clients, self.num_classes)
        self.shares = stated.of_clients(self.num_clients, self.client_names, count, self.split.seed)
        self.stated = stated
        self.reading.facts["class shares"] = stated.text

    def _replace_by_features(self) -> None:
        """Takes features of the backbone for the samples that the federation uses."""
        self.own_data_hash()  # of the samples themselves
        used = torch.cat([self._outside_server, self._server, self._validation]).unique()
        used = used[used < len(self._train.images)]  # a server of other machines has its own alone
        of_used = self.inputs.extractor(self._train.images[used], augmented=True)
        features = torch.zeros(len(self._train.images), *of_used.shape[1:])
        features[used] = of_used
        self._train = replace(self._train, images=features)
        self._test = self._with_features(self._test)
        if self._own_validation is not None:
            self._own_validation = self._with_features(self._own_validation)
        self.inputs = replace(self.inputs, moments=measure(of_used[:, 0]))

    def _with_features(self, split: ImageSplit) -> ImageSplit:
        """A split with plain features for its samples."""
        return replace(split, images=self.inputs.extractor(split.images))

    def to(self, device: torch.device | str) -> None:
        """Moves the images and all indices to a device, once.

        Args:
            device: Where training and evaluation will run.
        """
        device = torch.device(device)
        for name in _ON_DEVICE:
            if (part := getattr(self, name)) is not None:
                setattr(self, name, part.to(device))

    def with_labels(self, rows: Tensor) -> FederatedDataModule:
        """The same data, once they are set up, but the server has only some of its labels.

        Args:
            rows: These labels, by their place among the server's.
        """
        subset = copy.copy(self)
        subset._server = self._server[rows]
        subset.split = replace(self.split, server_labeled=subset._server)
        return subset

    def local_data(
        self, party: int, round_index: int, dtype: torch.dtype = torch.float32
    ) -> LocalData:
        """What one party may see in one round.

        Args:
            party: A client's number, or :data:`lightning_fedssl.sampling.SERVER`.
            round_index: The round, from 1.
            dtype: The floating type of its views.
        """
        is_server = party == sampling.SERVER
        at_server = self._server, self._server[:0]
        labeled, unlabeled = at_server if is_server else self._clients[party]
        return LocalData(
            party=party,
            round=round_index,
            seed=self.seed,
            images=self._train.images,
            labeled=labeled,
            labels=self._train.labels[labeled],
            unlabeled=unlabeled,
            batch_size=self.server_batch_size if is_server else self.client_batch_size,
            views=self.inputs.views(dtype),
            dtype=dtype,
            shares=self.shares.get(party),
        )

    def evaluation_batches(
        self,
        stage: Literal["validate", "test"],
        dtype: torch.dtype = torch.float32,
        shard: tuple[int, int] = (0, 1),
        indices: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches ``(images, labels)`` of plain views, in data-set order.

        Args:
            stage: ``"validate"`` for the validation images, ``"test"`` for the test images.
            dtype: The floating type of the images.
            shard: ``(rank, ranks)``: the batches rank, rank + ranks, .. only; together the ranks
                see every image once.
            indices: The images to take, by their place among those of the stage, in this order; all
                if left out.
        """
        for images, labels in self._evaluated(stage).batches(self.eval_batch_size, shard, indices):
            yield self.inputs.plain(images, dtype), labels

    def _evaluated(self, stage: Literal["validate", "test"]) -> Evaluated:
        """The samples that a stage evaluates."""
        if stage == "validate" and self._own_validation is not None:
            return Evaluated(self._own_validation)
        if stage == "validate" and self.validation != "test":
            return Evaluated(self._train, self._validation)
        return Evaluated(self._test)

    def predict_files(self) -> list[str]:
        """Paths of the images to predict, relative to their folder; none for test images that are
        no known files.

        Raises:
            FileNotFoundError: If there is no such folder, or no image in it.
            ValueError: If the samples of the data set are not 8-bit pixels.
        """
        if self.predict_root is None:
            return list(self._test.files)
        return new_files(Path(self.predict_root), self.spec.pixels, self.reading)

    def predict_sizes(self) -> list[tuple[int, int]]:
        """Width and height of the files of :meth:`predict_files`, as they are seen."""
        root = Path(self.predict_root or str(getattr(self.source, "root", "")))
        return [image_files.upright_size(root / name) for name in self.predict_files()]

    def predict_batches(
        self, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of plain views of the images to predict, and their labels; the label of a new
        image is -1.

        The files are read as the data set's images are: resized to cover the network's size,
        cropped to their centre.

        Args:
            dtype: The floating type of the images.
        """
        if self.predict_root is None:
            yield from self.evaluation_batches("test", dtype)
            return
        device = self.test_labels.device
        root = Path(self.predict_root)
        size, shape = self.eval_batch_size, self.spec.in_shape
        for images in new_batches(root, self.predict_files(), size, shape):
            if self.backbone is not None:
                images = self.inputs.extractor(images)
            unknown = torch.full((len(images),), -1, device=device)
            yield self.inputs.plain(images.to(device), dtype), unknown

    @property
    def test_images(self) -> Tensor:
        """The test images, ``(images, *in_shape)``."""
        return self._test.images

    @property
    def test_labels(self) -> Tensor:
        """Labels of the test images, ``(images,)``."""
        return self._test.labels

    @property
    def validation_labels(self) -> Tensor:
        """Labels of the validation images, ``(images,)``; none without validation."""
        return self._evaluated("validate").labels

    def client_test_indices(self, client: int) -> Tensor | None:
        """Indices of a client's own test images among all test images; None if clients have none of
        their own.

        They have some where the data have client identifiers and the partition is
        ``NaturalClients``.

        Args:
            client: The client's number.
        """
        owners = self._test.client_ids
        if owners is None or not isinstance(self.partition, NaturalClients):
            return None
        return (owners == client).nonzero().flatten()

    def true_labels(self, indices: Tensor) -> Tensor:
        """True labels of training images, -1 where nobody knows one: for diagnostics, never given
        to an algorithm.

        Nothing but this convention keeps a method of your own from calling it; no method of this
        package does.

        Args:
            indices: ``(n,)``.

        Returns:
            ``(n,)`` int64.
        """
        return self._train.labels[indices]

    def own_data_hash(self) -> str:
        """SHA-256 over all samples and labels of data of the user's own; empty for a data set of a
        fixed content.
        """
        if self.source is None:
            return ""
        if self._own_hash is None:
            splits = [self._train, self._test, self._own_validation]
            self._own_hash = hash_of(t for s in splits if s for t in (s.labels, s.images))
        return self._own_hash

    def unlabeled_pool(self) -> Tensor:
        """Indices of all clients' images, in data-set order: what a pass over all clients' images
        reads.

        Labels play no part: where clients hold labelled images, those are among them.
        """
        return self._pool

    def images_outside_the_server(self) -> Tensor:
        """Indices of all images of the federation but the server's, in data-set order.

        The clients' images, and those that the partition assigns to no client: the remainder of
        equal parts.
        """
        return self._outside_server

    @property
    def constants_of_clients(self) -> list[str]:
        """The constants that are computed from the samples of clients, too: a sentence with the
        key and the remedy for each.
        """
        rows = "data.dataset: {} of all clients' rows; give columns of numbers without empty cells."
        constants = [rows.format(words) for words in self.spec.fitted]
        if self.normalize is True and (self.spec.measured or self.backbone is not None):
            constants.append(
                "data.normalize: mean and deviation are those of all clients' samples; give public "
                "{mean: [...], std: [...]} (of a backbone's features there are none), or false."
            )
        return constants


def require_federated(datamodule: object) -> None:
    """Refuses anything but a federated data module.

    Args:
        datamodule: What a trainer was given.

    Raises:
        TypeError: With the way to adapt a data module of Lightning's.
    """
    if not isinstance(datamodule, FederatedDataModule):
        raise TypeError(
            f"FederatedTrainer needs a FederatedDataModule, not {type(datamodule).__name__}. A "
            "Lightning data module is adapted by FederatedDataModule(datamodule, weak=..., "
            "strong=..., num_clients=...); data sets, such as those of a DataLoader, by "
            "FederatedDataModule.from_datasets(train=..., test=..., weak=..., strong=...)"
        )
