"""The image data sets: their specifications, and how their files are read as uint8 tensors.

Every set is held whole, as one uint8 tensor ``(N, channels, height, width)`` per split: sets of
these sizes fit in memory, a batch is then a gather by index, and augmentation works on batches.
torchvision's own classes read the files and check their sums; they are imported when first needed.

Normalisation constants: SemiFL (NeurIPS 2022) for MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, SVHN
and STL-10; FedRGD (IEEE BigData 2021) for EMNIST; the training images themselves for digits.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation by channel or feature."""


@dataclass(frozen=True)
class ImageSplit:
    """The images and labels of one split.

    Attributes:
        images: uint8 ``(N, channels, height, width)``, or float32 numbers ``(N, ...)``.
        labels: The targets, as the task has them: of a classification int64 ``(N,)``, in
            0..num_classes-1; -1 for a training sample without a label.
        client_ids: The natural client of every image, int64 ``(N,)``, -1 for none; None if the data
            have none.
        files: The file of every image, for ``predictions.csv``; empty if they are not known.
    """

    images: Tensor
    labels: Tensor
    client_ids: Tensor | None = None
    files: tuple[str, ...] = ()

    def to(self, device: torch.device) -> ImageSplit:
        """The same on a device; identifiers of clients stay where they are."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


def hash_of(tensors: Iterable[Tensor], head: str = "") -> str:
    """SHA-256 over tensors.

    Args:
        tensors: In any type that NumPy has.
        head: A text to hash before them.
    """
    digest = hashlib.sha256(head.encode())
    for tensor in tensors:
        for rows in torch.atleast_1d(tensor).split(_HASHED_AT_ONCE):
            digest.update(rows.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


_HASHED_AT_ONCE = 1024
"""Rows of which bytes are copied at a time."""


@dataclass(frozen=True)
class DatasetSpec:
    """The specification of a data set, known before its files are read.

    Attributes:
        name: The canonical name, e.g. ``"fashion_mnist"``.
        num_classes: Number of classes.
        in_shape: Channels, height and width of an image.
        mean: Mean per channel, for pixels scaled to 0..1.
        std: Standard deviation per channel, for pixels scaled to 0..1.
        class_names: The classes in the order of their labels.
        pixels: Whether samples are 8-bit images; else they are float32 numbers of any shape, and so
            are mean and std.
        usual_views: Whether there are usual views, which ``auto`` means.
        client_names: The data's own clients in the order of their numbers; empty if they have none.
        measured: Whether mean and deviation come from the training samples, whoever has them;
            False for constants that were known before.
        fitted: What else the samples' numbers take from all training samples, in words.
        inputs: How the cells of a table become numbers, one for each feature
            (:data:`~lightning_fedssl.data.table_rows.Input`); empty for other samples.
        label_column: The column of a table's classes.
    """

    name: str
    num_classes: int
    in_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    pixels: bool = True
    usual_views: bool = True
    client_names: tuple[str, ...] = ()
    measured: bool = True
    fitted: tuple[str, ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()
    label_column: str = ""

    @property
    def noun(self) -> str:
        """What messages call a sample: ``image``, or ``sample`` for the row of a table, a signal
        and the like.
        """
        return "image" if self.pixels else "sample"


_DIGITS = tuple(string.digits)
_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_EMNIST = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
_CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit
raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
turtle wardrobe whale willow_tree wolf woman worm
"""

IMAGE_FOLDER = "image_folder"
"""The name of :class:`~lightning_fedssl.data.sources.image_lists.ImageFolder`."""

SPECS: dict[str, DatasetSpec] = {
    spec.name: replace(spec, measured=False)
    for spec in (
        DatasetSpec("digits", 10, (1, 8, 8), (0.3052,), (0.3760,), _DIGITS),
        DatasetSpec("mnist", 10, (1, 28, 28), (0.1307,), (0.3081,), _DIGITS),
        DatasetSpec("fashion_mnist", 10, (1, 28, 28), (0.2860,), (0.3530,), _FASHION),
        DatasetSpec("emnist", 47, (1, 28, 28), (0.1307,), (0.3081,), _EMNIST),
        DatasetSpec(
            "cifar10", 10, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), _CIFAR10
        ),
        DatasetSpec(
            "cifar100",
            100,
            (3, 32, 32),
            (0.5071, 0.4865, 0.4409),
            (0.2673, 0.2564, 0.2762),
            tuple(_CIFAR100.split()),
        ),
        DatasetSpec(
            "svhn", 10, (3, 32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), _DIGITS
        ),
        DatasetSpec(
            "stl10", 10, (3, 96, 96), (0.4409, 0.4279, 0.3868), (0.2683, 0.2610, 0.2687), _STL10
        ),
    )
}
"""The data sets by canonical name."""


@dataclass(frozen=True)
class _Source:
    """How torchvision reads one data set: its class, the arguments of the two splits, the files
    looked for.
    """

    class_name: str
    train: dict[str, Any]
    test: dict[str, Any]
    files: str


_BY_FLAG: dict[str, dict[str, Any]] = {"train": {"train": True}, "test": {"train": False}}
_BY_NAME: dict[str, dict[str, Any]] = {"train": {"split": "train"}, "test": {"split": "test"}}
_BALANCED: dict[str, dict[str, Any]] = {
    k: {"split": "balanced", **flag} for k, flag in _BY_FLAG.items()
}
_IDX_FILES = "raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"

_SOURCES = {
    "mnist": _Source("MNIST", **_BY_FLAG, files=f"MNIST/{_IDX_FILES}"),
    "fashion_mnist": _Source("FashionMNIST", **_BY_FLAG, files=f"FashionMNIST/{_IDX_FILES}"),
    "emnist": _Source(
        "EMNIST",
        **_BALANCED,
        files="EMNIST/raw/emnist-balanced-{train,test}-{images-idx3,labels-idx1}-ubyte",
    ),
    "cifar10": _Source(
        "CIFAR10", **_BY_FLAG, files="cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"
    ),
    "cifar100": _Source("CIFAR100", **_BY_FLAG, files="cifar-100-python/{train,test,meta}"),
    "svhn": _Source("SVHN", **_BY_NAME, files="{train,test}_32x32.mat"),
    # FedRGD assigns the labelled training split; the 100,000 further images without labels are in
    # no method's protocol.
    "stl10": _Source(
        "STL10", **_BY_NAME, files="stl10_binary/{train_X,train_y,test_X,test_y,unlabeled_X}.bin"
    ),
}


def canonical_name(name: str) -> str:
    """The canonical name of a data set; case, hyphens, underscores and blanks do not count.

    Args:
        name: For example ``"CIFAR-10"``.

    Raises:
        ValueError: If there is no such data set.
    """
    names = (*SPECS, IMAGE_FOLDER)
    for key in names:
        if re.sub(r"[-_\s]", "", name).lower() == key.replace("_", ""):
            return key
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {close[0]}? Choose" if close else "choose"
    raise ValueError(
        f"data.dataset: {shortened(name)!r} is not a known data set; {hint} one of "
        f"{', '.join(names)}, a .csv or .npz file that exists, or a class such as Datasets or "
        "ImageTable"
    )


def plural(count: int, noun: str) -> str:
    """A number and what is counted: ``1 core``, ``2 cores``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortened(value: object) -> str:
    """A value as a message shows it: its first 100 characters."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def load(
    name: str, root: str | Path = "data", download: bool = False
) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
    """Reads a data set: its specification, the training split and the test split.

    * ``digits`` comes with scikit-learn (1,797 images of 8x8). It has no official test split: of
      every class, each fifth image in the file's order is a test image, whatever the seed (355 in
      all).
    * ``emnist`` is the balanced split with 47 classes; its files hold transposed images, here they
      stand upright.
    * ``svhn`` is train and test, without the "extra" images; ``stl10`` the labelled splits, without
      the unlabelled one.

    Args:
        name: Name of the data set, spelt as :func:`canonical_name` allows.
        root: The data folder.
        download: Whether torchvision may download what is missing.

    Raises:
        FileNotFoundError: If the files are missing, incomplete or corrupt.
    """
    spec = SPECS[canonical_name(name)]
    if spec.name == "digits":
        images, labels = _digits()
        return spec, *every_fifth(images, labels)
    source = _SOURCES[spec.name]
    train = _read_torchvision(spec, source.train, Path(root), download)
    return spec, train, _read_torchvision(spec, source.test, Path(root), download)


def every_fifth(values: Tensor, labels: Tensor) -> tuple[ImageSplit, ImageSplit]:
    """Training and test split: of every class, each fifth sample in the given order is a test
    sample.

    Args:
        values: The samples.
        labels: Their labels, ``(N,)``.
    """
    is_test = torch.from_numpy(is_fifth(labels.numpy()))
    train = ImageSplit(values[~is_test], labels[~is_test])
    return train, ImageSplit(values[is_test], labels[is_test])


def is_fifth(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Which samples are each fifth one of their class, ``(N,)``.

    Args:
        labels: ``(N,)``, in the order of the samples; below 0 for none.
    """
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels[labels >= 0]):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return is_test


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """All images and labels, read once in a process: scikit-learn parses them as text, as long as a
    run's set-up.
    """
    bunch = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.from_numpy(bunch.images)[:, None] * (255 / 16)
    return images.round().to(torch.uint8), torch.from_numpy(bunch.target)


def _read_torchvision(
    spec: DatasetSpec, arguments: dict[str, Any], root: Path, download: bool
) -> ImageSplit:
    source = _SOURCES[spec.name]
    reader = getattr(importlib.import_module("torchvision.datasets"), source.class_name)
    try:
        data = reader(root=str(root), download=download, **arguments)
    except Exception as error:  # a damaged file raises what its reader happens to meet
        remedy = (
            "the download failed: check the network and the free space, or place the files there "
            "yourself"
            if download
            else "place the files there, point data.root at the folder that holds them, or give "
            "--data.download true"
        )
        raise FileNotFoundError(
            f"data.root: {spec.name} was not found, or is damaged, in {str(root)!r}. Looked for "
            f"{source.files}; {remedy}. Reported: {error or type(error).__name__}"
        ) from error
    images = torch.from_numpy(np.ascontiguousarray(data.data))
    if spec.name in ("mnist", "fashion_mnist", "emnist"):
        images = images[:, None]
    if spec.name == "emnist":
        images = images.transpose(2, 3).contiguous()
    if spec.name in ("cifar10", "cifar100"):
        images = images.permute(0, 3, 1, 2).contiguous()
    return ImageSplit(
        images, torch.as_tensor(data.targets if hasattr(data, "targets") else data.labels)
    )
