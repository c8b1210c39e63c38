"""Image files with labels and clients: in a folder for each class or each site, or listed in a CSV
file.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data.datasets import IMAGE_FOLDER, DatasetSpec, ImageSplit, shortened
from lightning_fedssl.data.image_files import (
    LINKS,
    described,
    has_pages,
    image_files,
    read_images,
    read_mask,
    visible_folders,
)
from lightning_fedssl.data.sources.base import (
    DataSource,
    LoadedData,
    client_of,
    number_clients,
    part_of,
    read_csv,
)
from lightning_fedssl.data.sources.reading import NO_LABEL
from lightning_fedssl.data.sources.table import label_numbers
from lightning_fedssl.functional.frozen import listed

_NORMALIZATION = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}
"""ImageNet's usual constants by the number of channels; grey: their means."""


class ListedImage(NamedTuple):
    """One image file.

    Attributes:
        path: The file.
        label: The class's name; empty for an image without a label.
        client: The client's identifier; None where the list has none.
    """

    path: Path
    label: str
    client: str | None = None


_MASK = re.compile(r"(.+)[-_ .](?:mask|masks|seg|segmentation|annotation)", re.IGNORECASE)
"""Names of masks next to their images."""

_PAGED = (".tif", ".tiff", ".gif")

_TEST_EVERY = 5
"""Of how many images of a class at a site one is a test image."""

Lists = dict[str, list[ListedImage]]
"""The images of the parts train, test and, where there are some, validation and unlabeled."""


class ImageList(DataSource):
    """Base of sources of image files: a subclass lists them.

    An image is resized to cover a square and cropped to its centre; the normalisation is
    ImageNet's. The classes are in sorted order of their names. A training image whose label is
    empty, NA, nan, None, ? or -1 has none, and only clients get it.

    Args:
        root: The folder that file names are relative to.
        image_size: Side of the images in pixels.
        channels: 3 for colours, 1 for grey.
    """

    name: ClassVar[str] = ""
    usual_views: ClassVar[bool] = False

    def __init__(self, root: str | Path, image_size: int, channels: int = 3) -> None:
        if image_size < 1 or channels not in _NORMALIZATION:
            raise ValueError(
                f"data.dataset: image_size is {image_size} and channels {channels}: give a side of "
                "at least 1 pixel, and 1 or 3 channels"
            )
        self.root = str(root)
        self.image_size = image_size
        self.channels = channels
        self._lists: Lists | None = None
        self._left_out: Counter[str] = Counter()

    def list_images(self) -> Lists:
        """The images of the parts train and test, and of validation and unlabeled if given."""
        raise NotImplementedError(f"{type(self).__name__} must override list_images")

    def describe(self) -> DatasetSpec:
        """The specification, from the list alone."""
        lists = self._listed()
        names = self.classes_of(lists["train"])
        clients = number_clients(_clients(_training(lists)), None)[2]
        name = self.name or type(self).__name__
        shape = (self.channels, self.image_size, self.image_size)
        normalization = _NORMALIZATION[self.channels]
        return DatasetSpec(
            name,
            len(names),
            shape,
            *normalization,
            names,
            True,
            self.usual_views,
            clients,
            measured=False,
        )

    def load(self) -> LoadedData:
        """Decode the images, or open those in ``cache_dir``."""
        spec = self.describe()
        lists = self._listed()
        train = _training(lists)
        test = lists["test"]
        owners, test_owners, _ = number_clients(_clients(train), _clients(test))
        validation = self._read(lists["validation"], spec) if lists.get("validation") else None
        return LoadedData(
            spec, self._read(train, spec, owners), self._read(test, spec, test_owners), validation
        )

    def classes_of(self, train: Sequence[ListedImage]) -> tuple[str, ...]:
        """The names of the classes, from the training images."""
        return tuple(sorted({image.label for image in train}))

    def targets_of(self, images: Sequence[ListedImage], spec: DatasetSpec) -> Tensor:
        """The targets of images, from their labels; an empty label is none."""
        numbers = {name: number for number, name in enumerate(spec.class_names)} | {"": -1}
        for image in images:
            if image.label not in numbers:
                raise ValueError(
                    f"data.dataset: the class {image.label!r} of {str(image.path)!r} is not among "
                    f"the classes of the training images ({', '.join(spec.class_names)}); correct "
                    "the label, or add training images"
                )
        return torch.tensor([numbers[image.label] for image in images])

    def _listed(self) -> Lists:
        """The lists, with training images without a label among the unlabeled ones."""
        if self._lists is None:
            lists = dict(self.list_images())
            labeled: list[ListedImage] = []
            empty: list[ListedImage] = []
            for image in lists.get("train", []):
                (empty if image.label in NO_LABEL else labeled).append(image)
            if any(image.label for image in empty):
                self.reading.warn(
                    f"training images without a label ({len(empty)} in all): {empty[-1].label!r} "
                    f"of {empty[-1].path.name!r}"
                )
            unlabeled = [image._replace(label="") for image in empty]
            lists["train"] = labeled
            lists["unlabeled"] = lists.get("unlabeled", []) + unlabeled
            rest = described(self._left_out)
            for part in ("train", "test"):
                if not lists.get(part):
                    raise FileNotFoundError(
                        f"data.dataset: {type(self).__name__} found no {part} images with labels "
                        f"in {self.root!r}{_contents(Path(self.root))}{rest}"
                    )
            if rest:
                self.reading.warn(f"{Path(self.root).name}{rest}")
            self._warn_of_files(lists)
            self._lists = lists
        return self._lists

    def _of_parts(self, labeled: Callable[[Path], list[ListedImage]]) -> Lists:
        """The images in the folders of the parts; ``labeled`` lists those of a labelled folder."""
        lists: Lists = {"train": [], "test": [], "validation": [], "unlabeled": []}
        beside = Counter[str]()
        for folder in visible_folders(Path(self.root), beside):
            part = part_of(folder.name)
            if part not in lists:
                self._left_out[f"{folder.name}/"] += 1
            elif part == "unlabeled":
                files = image_files(folder, "data.root", self._left_out)
                lists[part] += [ListedImage(path, "") for path in files]
            else:
                lists[part] += labeled(folder)
        if LINKS in beside:
            self._left_out[LINKS] += beside[LINKS]
        return lists

    def _warn_of_files(self, lists: Lists) -> None:
        """Name files that may not be what they are taken for: masks, and pages."""
        paths = [image.path for images in lists.values() for image in images]
        stems = {path.stem for path in paths}
        masks = [path for path in paths if {*_MASK.findall(path.stem)} & stems]
        pages = [path for path in paths if path.suffix.lower() in _PAGED and has_pages(path)]
        for files, text in (
            (masks, "are named as masks of others, and read as images: move them away"),
            (pages, "have several pages, of which the first is read"),
        ):
            if files:
                self.reading.warn(
                    f"files {text} ({len(files)} in all; the first is {files[0].name!r})"
                )

    def _read(
        self, images: Sequence[ListedImage], spec: DatasetSpec, owners: Tensor | None = None
    ) -> ImageSplit:
        paths = [image.path for image in images]
        pixels = read_images(paths, spec.in_shape, self.cache_dir, "data.dataset")
        labels = self.task.clean_targets(self.targets_of(images, spec))
        files = tuple(Path(os.path.relpath(path, self.root)).as_posix() for path in paths)
        return ImageSplit(pixels, labels, owners, files)


class ImageFolder(ImageList):
    """``root/train/<class>/*.png`` and ``root/test/<class>/*.png`` (or another format):
    ``data.dataset image_folder``.

    Images in ``root/unlabeled``, in any folder, have no label; those in ``root/validation/<class>``
    (or ``root/val``) are the validation images; case does not count. Names that begin with a dot
    are ignored, and so are thumbnails and other folders that a NAS or an archive adds.

    Args:
        root: The folder.
        image_size: Side of the images in pixels.
        channels: 3 for colours, 1 for grey.

    Raises:
        FileNotFoundError: If there is no folder of a class.
    """

    name: ClassVar[str] = IMAGE_FOLDER
    usual_views: ClassVar[bool] = True

    def list_images(self) -> Lists:
        """List the images in the folders of the parts and classes."""
        return self._of_parts(self._of_classes)

    def _of_classes(self, root: Path) -> list[ListedImage]:
        """The images of every class folder in torchvision's order: a folder's own files precede
        those of its folders.
        """
        images = []
        for folder in visible_folders(root, self._left_out):
            for path in image_files(folder, "data.root", self._left_out):
                images.append(ListedImage(path, _composed(folder.name)))
        return sorted(images, key=lambda one: (one.label, str(one.path.parent), one.path.name))


class ImageTable(ImageList):
    """Images listed in a CSV file with a head: file names and labels, with columns for the split
    and the client.

    The split column holds train, test, validation (or val) or unlabeled.

    Args:
        csv_file: The CSV file, UTF-8.
        image_size: Side of the images in pixels.
        folder: The folder that file names are relative to; the CSV file's own folder if left out.
        channels: 3 for colours, 1 for grey.
        file_column: Column of the file names.
        label_column: Column of the classes' names; the classes are in sorted order.
        label_columns: In place of it, a column for each class with 0 or 1 (``data.task:
            MultiLabel``), or columns of numbers to predict (``Regression``).
        split_column: Column of the split.
        client_column: Column of the clients' identifiers, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`; no identifiers if left
            out.

    Raises:
        FileNotFoundError: If there is no such CSV file.
        ValueError: If a column is missing, a row is not usable or two rows list one file; the
            message names the row.
    """

    def __init__(
        self,
        csv_file: str,
        image_size: int,
        folder: str | None = None,
        channels: int = 3,
        file_column: str = "file",
        label_column: str = "label",
        split_column: str = "split",
        client_column: str | None = None,
        label_columns: Sequence[str] = (),
    ) -> None:
        super().__init__(folder or Path(csv_file).parent, image_size, channels)
        self.label_columns = label_columns
        self.csv_file = csv_file
        self.file_column = file_column
        self.label_column = label_column
        self.split_column = split_column
        self.client_column = client_column

    def list_images(self) -> Lists:
        """Read the CSV file, and list its images by part."""
        of_labels = [*self.label_columns] or [self.label_column]
        columns = [self.file_column, self.split_column, *of_labels]
        client = self.client_column
        lists: Lists = {"train": [], "test": [], "validation": [], "unlabeled": []}
        paths = set()
        rows = read_csv(self.csv_file, columns + ([client] if client else []), self.reading)
        numbers = label_numbers(rows, self.label_columns, self.csv_file)
        for row, values in zip(rows, numbers, strict=True):
            name = row[self.file_column]
            word = row[self.split_column]
            label = row[of_labels[0]]
            if self.label_columns:
                label = "" if np.isnan(values).all() else " ".join(map(str, values))
            path = Path(os.path.normpath(Path(self.root, name)))
            part = part_of(word)
            owner = client_of(row[client]) if client else None
            where = f"data.dataset: {self.csv_file!r}, row {row.number}"
            if not name or path in paths:
                raise ValueError(f"{where}: the file {name!r} must be one that no other row names")
            if part not in lists:
                raise ValueError(f"{where}: the split {word!r} must be one of {', '.join(lists)}")
            if client and not owner and part in ("train", "unlabeled"):
                raise ValueError(f"{where} has no {client}; complete it")
            if part in ("test", "validation") and label in NO_LABEL:
                raise ValueError(f"{where}: the {part} image has no label; complete it")
            label = "" if part == "unlabeled" else label
            paths.add(path)
            lists[part].append(ListedImage(path, label, owner))
        return lists

    def classes_of(self, train: Sequence[ListedImage]) -> tuple[str, ...]:
        """The label columns; without them the labels of the training images."""
        return (*self.label_columns,) or super().classes_of(train)

    def targets_of(self, images: Sequence[ListedImage], spec: DatasetSpec) -> Tensor:
        """The numbers in the label columns, ``(images, columns)``; without them class numbers."""
        if not self.label_columns:
            return super().targets_of(images, spec)
        none = ["nan"] * len(self.label_columns)
        rows = [[*map(float, image.label.split() or none)] for image in images]
        return torch.tensor(rows, dtype=torch.float64)


class MaskFolders(ImageList):
    """Images with a mask each, for ``data.task: Segmentation``: ``root/train/images/NAME.jpg`` and
    ``root/train/masks/NAME.png``, likewise ``test`` and ``validation`` (or ``val``); case does
    not count. In folders below ``images``, a mask is in the same folder below ``masks``.

    Images in ``root/unlabeled``, and training images without a mask, have none. A mask is resized
    and cropped as its image is, without interpolation. Its values are the numbers of the classes,
    and 255 marks pixels that do not count. With two classes every value above 0 is the second one,
    unless some mask of the part has both a 1 and a 255.

    Args:
        root: The folder.
        image_size: Side of the images in pixels.
        class_names: Names of the classes in the order of the masks' values.
        channels: 3 for colours, 1 for grey.

    Raises:
        FileNotFoundError: If a folder of images or the mask of a test image is missing.
        ValueError: If a mask has colours, or a value of no class.
    """

    def __init__(
        self, root: str, image_size: int, class_names: Sequence[str], channels: int = 3
    ) -> None:
        super().__init__(root, image_size, channels)
        self.class_names = class_names

    def list_images(self) -> Lists:
        """List the images in the folders of the parts, each with its mask."""
        return self._of_parts(self._with_masks)

    def _with_masks(self, folder: Path) -> list[ListedImage]:
        masks = {}
        for path in image_files(folder / "masks", "data.dataset", self._left_out):
            masks[path.relative_to(folder / "masks").with_suffix("")] = str(path)
        images_with_masks = []
        for path in image_files(folder / "images", "data.dataset", self._left_out):
            name = path.relative_to(folder / "images").with_suffix("")
            if name not in masks and part_of(folder.name) != "train":
                raise FileNotFoundError(
                    f"data.dataset: {str(path)!r} has no mask of its name in {folder}: give "
                    f"masks/{name.as_posix()}.png"
                )
            images_with_masks.append(ListedImage(path, masks.get(name, "")))
        return images_with_masks

    def classes_of(self, train: Sequence[ListedImage]) -> tuple[str, ...]:
        """The configured names, in the order of the masks' numbers."""
        return (*map(str, self.class_names),)

    def targets_of(self, images: Sequence[ListedImage], spec: DatasetSpec) -> Tensor:
        """Masks ``(images, side, side)``, -1 where a pixel does not count."""
        count = spec.num_classes
        side = self.image_size
        masks = torch.full((len(images), side, side), -1)
        for mask, image in zip(masks, images, strict=True):
            if image.label:
                mask.copy_(read_mask(image.label, side, image.path))
        values = [*map(int, masks.unique())]
        text = listed([str(value) for value in values if value >= 0])
        self.reading.facts.setdefault("mask values", text)  # of training samples
        if count == 2 and not any(1 in mask and 255 in mask for mask in masks):
            if not {*values} <= {-1, 0, 1, 255}:
                self.reading.warn(
                    f"masks hold {text} and there are two class_names: every value above 0 is "
                    f"{self.class_names[1]!r}"
                )
            masks.clamp_(max=1)
        masks[masks == 255] = -1
        for mask, image in zip(masks, images, strict=True):
            if (largest := int(mask.max())) >= count:
                raise ValueError(
                    f"data.dataset: {image.label!r} has the value {largest}, and there are "
                    f"{count} class_names; a mask holds their numbers, from 0, or 255"
                )
        return masks


class SiteFolders(ImageList):
    """A folder for each site, in it one for each class: ``root/<site>/<class>/*.png``. A site is a
    client.

    Images in ``root/<site>/unlabeled`` have no label. Of every class at every site, each fifth file
    in sorted order is a test image of that site. Names that begin with a dot are ignored.

    Args:
        root: The folder of the sites.
        image_size: Side of the images in pixels.
        channels: 3 for colours, 1 for grey.

    Raises:
        FileNotFoundError: If there is no folder of a site, or no image in it.
    """

    def list_images(self) -> Lists:
        """List the images in the folders of the sites and classes."""
        lists: Lists = {"train": [], "test": []}
        few: list[str] = []
        for site in visible_folders(Path(self.root), self._left_out):
            for folder in visible_folders(site, self._left_out):
                files = image_files(folder, "data.dataset", self._left_out)
                if part_of(folder.name) == "unlabeled":
                    lists["train"] += [ListedImage(path, "", site.name) for path in files]
                    continue
                if len(files) < _TEST_EVERY:
                    few.append(f"{site.name}/{folder.name}")
                for number, path in enumerate(files, start=1):
                    part = "test" if number % _TEST_EVERY == 0 else "train"
                    lists[part].append(ListedImage(path, _composed(folder.name), site.name))
        if few:
            self.reading.warn(
                f"folders with less than {_TEST_EVERY} images have no test image ({len(few)} in "
                f"all; the first is {few[0]})"
            )
        return lists


def _composed(name: str) -> str:
    """A name in one form of Unicode; macOS writes names in another."""
    return unicodedata.normalize("NFC", name)


def _contents(root: Path) -> str:
    """What is in a folder in which images were sought, as the end of a sentence."""
    if not root.is_dir():
        return ", which is a file: unpack it" if root.is_file() else ", which does not exist"
    names = sorted(entry.name for entry in root.iterdir())
    deeper = [name for name in names if Path(root, name, "train").is_dir()]
    hint = f"; try {str(root / deeper[0])!r}" if deeper else ""
    return f", which holds {shortened(', '.join(names)) or 'nothing'}{hint}"


def _training(lists: Lists) -> list[ListedImage]:
    """The training images, those without labels last."""
    return [*lists["train"], *lists.get("unlabeled", [])]


def _clients(images: Sequence[ListedImage]) -> list[str | None] | None:
    """The identifiers of the images' clients; None if there are none."""
    clients = [image.client for image in images]
    return clients if any(clients) else None
