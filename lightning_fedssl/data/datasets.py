"""The image data sets: their specifications, and how their files are read as uint8 tensors.

Every set is held whole, as one uint8 tensor ``(N, channels, height, width)`` per split: sets of these sizes fit in
memory, a batch is then a gather by index, and augmentation works on batches. torchvision's own classes read the files
and check their sums; they are imported when first needed.

Normalisation constants: SemiFL (NeurIPS 2022) for MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, SVHN and STL-10; FedRGD
(IEEE BigData 2021) for EMNIST; the training images themselves for digits; ImageNet's usual ones for a folder of images.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pickle
import re
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data import image_files


@dataclass(frozen=True)
class ImageSplit:
    """The images and labels of one split.

    Attributes:
        images: uint8 ``(N, channels, height, width)``, or float32 numbers ``(N, ...)``; a tensor, or
            :class:`~lightning_fedssl.data.mapped_images.MappedImages`, which can be indexed like one.
        labels: int64 ``(N,)``, in 0..num_classes-1; -1 for a training sample without a label.
        client_ids: The natural client of every image, int64 ``(N,)``, -1 for none; None if the data have none.
        files: The file of every image, for ``predictions.csv``; empty if they are not known.
    """

    images: Tensor
    labels: Tensor
    client_ids: Tensor | None = None
    files: tuple[str, ...] = ()

    def to(self, device: torch.device) -> ImageSplit:
        """The same on a device; identifiers of clients stay where they are."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


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
        pixels: Whether samples are 8-bit images; else they are float32 numbers of any shape, and so are mean and std.
        usual_views: Whether there are usual views, which ``auto`` means.
    """

    name: str
    num_classes: int
    in_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    pixels: bool = True
    usual_views: bool = True

    @property
    def noun(self) -> str:
        """What messages call a sample: ``image``, or ``sample`` for the row of a table, a signal and the like."""
        return "image" if self.pixels else "sample"


_DIGITS = tuple(string.digits)
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_EMNIST = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

_IMAGE_FOLDER = DatasetSpec("image_folder", 0, (3, 0, 0), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), ())
"""The part of an image folder's specification that does not depend on the folder."""

SPECS: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        DatasetSpec("digits", 10, (1, 8, 8), (0.3052,), (0.3760,), _DIGITS),
        DatasetSpec("mnist", 10, (1, 28, 28), (0.1307,), (0.3081,), _DIGITS),
        DatasetSpec("fashion_mnist", 10, (1, 28, 28), (0.2860,), (0.3530,), _FASHION),
        DatasetSpec("emnist", 47, (1, 28, 28), (0.1307,), (0.3081,), _EMNIST),
        DatasetSpec("cifar10", 10, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), _CIFAR10),
        DatasetSpec(
            "cifar100", 100, (3, 32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), tuple(_CIFAR100.split())
        ),
        DatasetSpec("svhn", 10, (3, 32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), _DIGITS),
        DatasetSpec("stl10", 10, (3, 96, 96), (0.4409, 0.4279, 0.3868), (0.2683, 0.2610, 0.2687), _STL10),
        _IMAGE_FOLDER,
    )
}
"""The data sets by canonical name. ``image_folder`` is completed by :func:`describe`, which looks at the folder."""


@dataclass(frozen=True)
class _Source:
    """How torchvision reads one data set: its class, the arguments of the two splits, the files looked for."""

    class_name: str
    train: dict[str, Any]
    test: dict[str, Any]
    files: str


_BY_FLAG: dict[str, dict[str, Any]] = {"train": {"train": True}, "test": {"train": False}}
_BY_NAME: dict[str, dict[str, Any]] = {"train": {"split": "train"}, "test": {"split": "test"}}
_BALANCED: dict[str, dict[str, Any]] = {k: {"split": "balanced", **flag} for k, flag in _BY_FLAG.items()}
_IDX_FILES = "raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"

_SOURCES = {
    "mnist": _Source("MNIST", **_BY_FLAG, files=f"MNIST/{_IDX_FILES}"),
    "fashion_mnist": _Source("FashionMNIST", **_BY_FLAG, files=f"FashionMNIST/{_IDX_FILES}"),
    "emnist": _Source(
        "EMNIST", **_BALANCED, files="EMNIST/raw/emnist-balanced-{train,test}-{images-idx3,labels-idx1}-ubyte"
    ),
    "cifar10": _Source("CIFAR10", **_BY_FLAG, files="cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}"),
    "cifar100": _Source("CIFAR100", **_BY_FLAG, files="cifar-100-python/{train,test,meta}"),
    "svhn": _Source("SVHN", **_BY_NAME, files="{train,test}_32x32.mat"),
    # FedRGD assigns the labelled training split; the 100,000 further images without labels are in no method's protocol.
    "stl10": _Source("STL10", **_BY_NAME, files="stl10_binary/{train_X,train_y,test_X,test_y,unlabeled_X}.bin"),
}

_VALIDATION_FOLDERS = ("validation", "val")
"""Names of the folder of an image folder's own validation images."""

_READ_ERRORS = (RuntimeError, OSError, ValueError, AssertionError, EOFError, KeyError, pickle.UnpicklingError)


def canonical_name(name: str) -> str:
    """The canonical name of a data set; case, hyphens, underscores and blanks do not count.

    Args:
        name: For example ``"CIFAR-10"``.

    Raises:
        ValueError: If there is no such data set.
    """
    known = {re.sub(r"[-_\s]", "", key): key for key in SPECS}
    key = known.get(re.sub(r"[-_\s]", "", name).lower())
    if key is None and "." in name:
        raise ValueError(f"data.dataset: {_why_no_source(name)}")
    if key is None:
        close = difflib.get_close_matches(name.lower(), SPECS, n=1)
        hint = f"did you mean {close[0]}? Choose" if close else "choose"
        raise ValueError(
            f"data.dataset: {name!r} is not a known data set; {hint} one of {', '.join(SPECS)}, or a class such as "
            "Datasets or ImageTable"
        )
    return key


def _why_no_source(path: str) -> str:
    """Why an import path names no source of data."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        return f"{path}: {module} cannot be imported ({type(error).__name__}: {error})"
    if found is None:
        return f"{path}: the module {module} has no {name}"
    return f"{path} is no source of data; give a class derived from DataSource, or a Lightning data module"


def describe(name: str, root: str | Path = "data", image_size: int | None = None) -> DatasetSpec:
    """What is known of a data set without reading its images.

    Args:
        name: Name of the data set, spelt as :func:`canonical_name` allows.
        root: The data folder; only looked at for ``image_folder``, whose classes are the folders in ``root/train``.
        image_size: Side of the images in pixels; for ``image_folder`` only, and needed there.

    Raises:
        ValueError: If the name is unknown or ``image_size`` does not fit the data set.
        FileNotFoundError: If the image folder has no ``train`` or ``test`` folder with a folder per class.
    """
    spec = SPECS[canonical_name(name)]
    if spec.name != "image_folder":
        if image_size is not None:
            raise ValueError(f"data.image_size: {spec.name} has a fixed size; leave it out (it is for image_folder)")
        return spec
    if image_size is None:
        raise ValueError("data.image_size: image_folder needs the side of its images in pixels, e.g. 32")
    classes = _class_folders(Path(root))
    return replace(spec, num_classes=len(classes), in_shape=(3, image_size, image_size), class_names=classes)


def load(
    name: str,
    root: str | Path = "data",
    download: bool = False,
    image_size: int | None = None,
    cache_dir: str | None = None,
) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
    """Reads a data set: its specification, the training split and the test split.

    * ``digits`` comes with scikit-learn (1,797 images of 8x8). It has no official test split: of every class, each
      fifth image in the file's order is a test image, whatever the seed (355 in all).
    * ``emnist`` is the balanced split with 47 classes; its files hold transposed images, here they stand upright.
    * ``svhn`` is train and test, without the "extra" images; ``stl10`` the labelled splits, without the unlabelled one.
    * ``image_folder`` is ``root/train/<class>/*.png`` and ``root/test/<class>/*.png`` (or another format), resized to
      cover a square of ``image_size`` pixels and cropped to its centre. Images in ``root/unlabeled``, in any folder,
      have no label. Names that begin with a dot are ignored.

    Args:
        name: Name of the data set, spelt as :func:`canonical_name` allows.
        root: The data folder.
        download: Whether torchvision may download what is missing.
        image_size: Side of the images in pixels; for ``image_folder`` only.
        cache_dir: Folder for decoded images; for ``image_folder`` only.

    Raises:
        FileNotFoundError: If the files are missing, incomplete or corrupt.
        ValueError: If the setting, the images or the labels are not usable.
    """
    spec = describe(name, root, image_size)
    if spec.name == "image_folder":
        return (
            spec,
            _read_folder(Path(root), "train", spec, cache_dir),
            _read_folder(Path(root), "test", spec, cache_dir),
        )
    if spec.name == "digits":
        train, test = _read_digits()
    else:
        source = _SOURCES[spec.name]
        train, test = (_read_torchvision(spec, chosen, Path(root), download) for chosen in (source.train, source.test))
    return spec, _image_split(*train, spec), _image_split(*test, spec)


def load_validation(root: str | Path, spec: DatasetSpec, cache_dir: str | None = None) -> ImageSplit | None:
    """Reads the validation images of an image folder, ``root/validation/<class>`` or ``root/val/<class>``.

    Args:
        root: The data folder.
        spec: The image folder's specification.
        cache_dir: Folder for decoded images.

    Returns:
        The images; None if there is no such folder.

    Raises:
        FileNotFoundError: If the folder has no class folder, or one of them no image.
        ValueError: If there are both folders, or a class that the training images do not have.
    """
    parts = [part for part in _VALIDATION_FOLDERS if (Path(root) / part).is_dir()]
    if not parts:
        return None
    folder = Path(root) / parts[0]
    if len(parts) > 1:
        raise ValueError(f"data.root: {str(root)!r} has the folders {' and '.join(parts)}; keep one of them")
    names = {entry.name for entry in image_files.visible_folders(folder)}
    if not names:
        raise FileNotFoundError(
            f"data.root: image_folder found no class folder in {str(folder)!r}; give one folder of validation images "
            "per class, or rename the folder"
        )
    if unknown := sorted(names - set(spec.class_names)):
        raise ValueError(
            f"data.root: {str(folder)!r} has the class {', '.join(unknown)}, which the folder train does not have; add "
            "training images, or remove it"
        )
    return _read_folder(Path(root), parts[0], spec, cache_dir, names)


def check_images(images: Tensor, name: str) -> Tensor:
    """Images as uint8, after a check that they can be.

    Args:
        images: ``(N, channels, height, width)``, uint8 or any other type with values in 0..255.
        name: The data set, for the message.

    Returns:
        uint8 images of the same shape; other types are rounded.

    Raises:
        ValueError: If the shape is another, channels come last, there is no image, or a value is NaN, infinite or out
            of range.
    """
    if len(images.shape) != 4 or 0 in images.shape:
        raise ValueError(
            f"data.dataset {name}: expected images (N, channels, height, width), got {tuple(images.shape)}"
        )
    if images.shape[1] > 4 and images.shape[3] in (1, 3, 4):
        raise ValueError(
            f"data.dataset {name}: images (N, channels, height, width) are expected, and {tuple(images.shape)} looks "
            "like (N, height, width, channels); turn them with images.permute(0, 3, 1, 2), in NumPy "
            "images.transpose(0, 3, 1, 2)"
        )
    if images.dtype == torch.uint8:
        return images
    broken = (~torch.isfinite(images)).flatten(1).any(dim=1)
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"data.dataset {name}: {int(broken.sum())} of {len(images)} images hold NaN or infinite values "
            f"(the first is image {first}); repair or remove them"
        )
    if images.min() < 0 or images.max() > 255:
        low, high = float(images.min()), float(images.max())
        raise ValueError(f"data.dataset {name}: pixel values {low:g}..{high:g} are outside 0..255; rescale the images")
    if images.is_floating_point() and images.max() <= 1 and (images != images.round()).any():
        raise ValueError(
            f"data.dataset {name}: the pixel values are numbers from 0 to 1, and 8-bit images have 0..255; multiply "
            "them by 255, or give the data set pixels=False to train on the numbers as they are"
        )
    return images.round().to(torch.uint8)


def check_labels(labels: Tensor, num_classes: int, name: str) -> Tensor:
    """Labels as int64, after a check that each names a class.

    Args:
        labels: ``(N,)`` whole numbers, of any type.
        num_classes: Number of classes.
        name: The data set, for the message.

    Raises:
        ValueError: If a label is no whole number, or outside 0..num_classes-1.
    """
    given, labels = labels, labels.to(torch.int64)
    if (broken := given[labels != given]).numel():
        raise ValueError(
            f"data.dataset {name}: {float(broken[0]):g} is no label; a label is the number of a class, from 0 to "
            f"{num_classes - 1}"
        )
    if len(labels) and labels.min() < 0:
        raise ValueError(
            f"data.dataset {name}: there is a label {int(labels.min())}, and classes are numbered from 0; give samples "
            "without a label as unlabeled data"
        )
    if len(labels) and labels.max() >= num_classes:
        raise ValueError(
            f"data.dataset {name}: class count mismatch: labels run from {int(labels.min())} to {int(labels.max())}, "
            f"but the {num_classes} classes are numbered from 0 to {num_classes - 1}; renumber the labels, or name all "
            "classes"
        )
    return labels


def _image_split(images: Tensor, labels: Tensor, spec: DatasetSpec) -> ImageSplit:
    images = check_images(images, spec.name)
    if tuple(images.shape[1:]) != spec.in_shape:
        raise ValueError(f"data.dataset {spec.name}: images are {tuple(images.shape[1:])}, expected {spec.in_shape}")
    if len(images) != len(labels):
        raise ValueError(
            f"data.dataset {spec.name}: {len(images)} images but {len(labels)} labels; the files are damaged"
        )
    check_labels(labels[labels >= 0], spec.num_classes, spec.name)
    return ImageSplit(images, labels.to(torch.int64))


def _read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    images, labels = _digits()
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        is_test[(labels == label).nonzero().flatten()[4::5]] = True
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """All images and labels, read once in a process: scikit-learn parses them as text, as long as a run's set-up."""
    bunch = importlib.import_module("sklearn.datasets").load_digits()
    return torch.from_numpy(bunch.images)[:, None] * (255 / 16), torch.from_numpy(bunch.target)


def _read_torchvision(
    spec: DatasetSpec, arguments: dict[str, Any], root: Path, download: bool
) -> tuple[Tensor, Tensor]:
    source = _SOURCES[spec.name]
    reader = getattr(importlib.import_module("torchvision.datasets"), source.class_name)
    try:
        data = reader(root=str(root), download=download, **arguments)
    except _READ_ERRORS as error:
        raise FileNotFoundError(_missing(spec.name, root, source.files, download, error)) from error
    labels = data.targets if hasattr(data, "targets") else data.labels
    return _layout(spec.name)(torch.from_numpy(np.ascontiguousarray(data.data))), torch.as_tensor(labels)


def _layout(name: str) -> Callable[[Tensor], Tensor]:
    """The change from torchvision's array to ``(N, channels, height, width)``."""
    if name == "emnist":
        return lambda images: images[:, None].transpose(2, 3).contiguous()
    if name in ("mnist", "fashion_mnist"):
        return lambda images: images[:, None]
    if name in ("cifar10", "cifar100"):
        return lambda images: images.permute(0, 3, 1, 2).contiguous()
    return lambda images: images


def _missing(name: str, root: Path, files: str, download: bool, error: BaseException) -> str:
    remedy = (
        "the download failed: check the network and the free space, or place the files there yourself"
        if download
        else "place the files there, point data.root at the folder that holds them, or give --data.download true"
    )
    problem = "is not complete" if root.is_dir() else "does not exist"
    place = "this is a file, not a folder" if root.is_file() else f"the folder {problem}"
    return (
        f"data.root: {name} was not found, or is damaged, in {str(root)!r} ({place}). "
        f"Looked for {files}; {remedy}. Reported: {error or type(error).__name__}"
    )


def _class_folders(root: Path) -> tuple[str, ...]:
    """The names of the class folders, equal in ``root/train`` and ``root/test``."""
    found = {}
    for part in ("train", "test"):
        folder = root / part
        names = [entry.name for entry in image_files.visible_folders(folder)]
        if not names:
            raise FileNotFoundError(
                f"data.root: image_folder looked for {str(folder / '<class>')!r} and found no class folder; data.root "
                "must hold the folders train and test, each with one folder of images per class"
            )
        found[part] = tuple(names)
    if found["train"] != found["test"]:
        raise ValueError(f"data.root: the class folders differ in {str(root)!r}: {_differences(found)}")
    return found["train"]


def _differences(found: Mapping[str, Collection[str]]) -> str:
    """What to do about the class folders that only one of the two parts has."""
    remedies = []
    for part, other in (("train", "test"), ("test", "train")):
        if odd := sorted(set(found[part]) - set(found[other])):
            names, folders = ", ".join(odd), "the folder" if len(odd) == 1 else "the folders"
            remedies.append(f"only {part} has {names}: add images of {names} to {other}, or remove {folders}")
    return "; ".join(remedies)


def _read_folder(
    root: Path, part: str, spec: DatasetSpec, cache_dir: str | None, classes: Collection[str] | None = None
) -> ImageSplit:
    """A part of an image folder; the images of ``unlabeled`` follow those of ``train``, with the label -1."""
    chosen = spec.class_names if classes is None else classes
    numbers = {name: label for label, name in enumerate(spec.class_names) if name in chosen}
    samples = [(path, label) for name, label in numbers.items() for path in _class_files(root / part / name)]
    if part == "train" and (root / "unlabeled").is_dir():
        samples += [(path, -1) for path in image_files.image_files(root / "unlabeled", "data.root")]
    images = image_files.read_images([path for path, _ in samples], spec.in_shape, cache_dir)
    split = _image_split(images, torch.tensor([label for _, label in samples]), spec)
    files = () if part == "train" else (path.relative_to(root).as_posix() for path, _ in samples)
    return replace(split, files=tuple(files))


def _class_files(folder: Path) -> list[Path]:
    """The image files of a class in torchvision's order, in which a folder's own files precede those of its folders."""
    return sorted(image_files.image_files(folder, "data.root"), key=lambda path: (str(path.parent), path.name))
