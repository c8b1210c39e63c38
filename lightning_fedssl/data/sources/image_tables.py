"""Image files with labels and clients: listed in a CSV file, or in a folder for each site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_fedssl.data import image_files
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.image_csv import CsvRow, read_image_csv
from lightning_fedssl.data.sources.base import DataSource, LoadedData, number_clients

_PARTS = ("train", "test", "validation", "unlabeled")
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
    client: str | None


class ImageList(DataSource):
    """Base of sources of image files: a subclass lists them, and they are decoded as ``image_folder`` decodes them.

    An image is resized to cover a square and cropped to its centre. The normalisation is that of ``image_folder``.

    Args:
        image_size: Side of the images in pixels.
        channels: 3 for colours, 1 for grey.
    """

    decodes_images: ClassVar[bool] = True

    def __init__(self, image_size: int, channels: int = 3) -> None:
        if image_size < 1 or channels not in _NORMALIZATION:
            raise ValueError(
                f"data.dataset: image_size is {image_size} and channels {channels}: give a side of at least 1 pixel, "
                "and 1 or 3 channels"
            )
        self.image_size = image_size
        self.channels = channels
        self._lists: dict[str, list[ListedImage]] | None = None

    @abstractmethod
    def list_images(self) -> dict[str, list[ListedImage]]:
        """The images of the parts train, test and, where there are some, validation and unlabeled."""

    def folder_of_images(self) -> Path:
        """The folder that the names of files in ``predictions.csv`` are relative to; the current one by default."""
        return Path()

    def describe(self) -> DatasetSpec:
        """The specification, from the list alone."""
        names = tuple(sorted({image.label for image in self._listed()["train"]}))
        shape = (self.channels, self.image_size, self.image_size)
        return DatasetSpec(type(self).__name__, len(names), shape, *_NORMALIZATION[self.channels], names, True, False)

    def load(self) -> LoadedData:
        """Decodes the images, or opens those in ``cache_dir``; see the base class."""
        spec, lists = self.describe(), self._listed()
        train = [*lists["train"], *lists.get("unlabeled", [])]
        owners, test_owners = number_clients(_clients(train), _clients(lists["test"]))
        validation = self._read(lists["validation"], spec, None) if lists.get("validation") else None
        return LoadedData(
            spec, self._read(train, spec, owners), self._read(lists["test"], spec, test_owners), validation
        )

    def _listed(self) -> dict[str, list[ListedImage]]:
        self._lists = self._lists or self.list_images()
        return self._lists

    def _read(self, images: Sequence[ListedImage], spec: DatasetSpec, owners: Tensor | None) -> ImageSplit:
        paths = [image.path for image in images]
        pixels = image_files.read_images(paths, spec.in_shape, self.cache_dir, "data.dataset")
        numbers = {name: number for number, name in enumerate(spec.class_names)} | {"": -1}
        if unknown := [image for image in images if image.label not in numbers]:
            raise ValueError(
                f"data.dataset: the class {unknown[0].label!r} of {str(unknown[0].path)!r} is not among the classes of "
                f"the training images ({', '.join(spec.class_names)}); correct the label, or add training images"
            )
        labels = torch.tensor([numbers[image.label] for image in images])
        return ImageSplit(pixels, labels, owners, tuple(self._name_of(image.path) for image in images))

    def _name_of(self, path: Path) -> str:
        """A file's path, relative to the folder of all images if it is in it."""
        folder = self.folder_of_images()
        return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()


class ImageTable(ImageList):
    """Images listed in a CSV file with a head: file names and labels, with columns for the split and the client.

    The split column holds train, test, validation or unlabeled; a row without a label must be in train or unlabeled,
    and only clients get its image.

    Args:
        csv_file: The CSV file, UTF-8.
        image_size: Side of the images in pixels.
        folder: The folder that file names are relative to; the CSV file's own folder if left out.
        channels: 3 for colours, 1 for grey.
        file_column: Column of the file names.
        label_column: Column of the classes' names; the classes are in sorted order.
        split_column: Column of the split.
        client_column: Column of the clients' identifiers, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`; no identifiers if left out.

    Raises:
        FileNotFoundError: If there is no such CSV file.
        ValueError: If a column is missing, a row is not usable or two rows list one file; the message names the lines.
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
    ) -> None:
        super().__init__(image_size, channels)
        self.csv_file = csv_file
        self.folder = folder
        self.file_column = file_column
        self.label_column = label_column
        self.split_column = split_column
        self.client_column = client_column

    def folder_of_images(self) -> Path:
        """The folder that the CSV file's names are relative to."""
        return Path(self.folder or Path(self.csv_file).parent)

    def list_images(self) -> dict[str, list[ListedImage]]:
        """Reads the CSV file; see the base class."""
        path = Path(self.csv_file)
        if not path.is_file():
            raise FileNotFoundError(f"data.dataset: the CSV file {self.csv_file!r} does not exist")
        lists: dict[str, list[ListedImage]] = {part: [] for part in _PARTS}
        columns = {
            self.file_column: "file_column", self.label_column: "label_column", self.split_column: "split_column"
        }  # fmt: skip
        if self.client_column is not None:
            columns[self.client_column] = "client_column"
        for place, row in read_image_csv(path, self.folder_of_images(), columns, self.file_column, "data.dataset"):
            part, image = self._parse(row, place)
            lists[part].append(image)
        if empty := [part for part in ("train", "test") if not lists[part]]:
            raise ValueError(
                f"data.dataset: {self.csv_file!r} has no image with {empty[0]} in its column {self.split_column!r} and "
                "with a label"
            )
        return lists

    def _parse(self, row: CsvRow, place: str) -> tuple[str, ListedImage]:
        """The part of an image, ``unlabeled`` for a training image without a label, and the image."""
        name, label, part = ((row[c] or "").strip() for c in (self.file_column, self.label_column, self.split_column))
        client = None if self.client_column is None else (row[self.client_column] or "").strip()
        if name and part not in _PARTS:
            raise ValueError(f"{place}: the split is {part!r}; a split is one of {', '.join(_PARTS)}")
        problem = None
        if not name:
            problem = "there is no file name"
        elif not label and part in ("test", "validation"):
            problem = f"the {part} image {name!r} has no label"
        elif client == "" and part in ("train", "unlabeled"):
            problem = f"{name!r} has no client in the column {self.client_column!r}"
        if problem:
            raise ValueError(f"{place}: {problem}; complete the row, or remove it")
        path = self.folder_of_images() / name
        if part == "unlabeled" or not label:
            return "unlabeled", ListedImage(path, "", client)
        return part, ListedImage(path, label, client)


class SiteFolders(ImageList):
    """A folder for each site, in it one for each class: ``root/<site>/<class>/*.png``. A site is a client.

    Of every class at every site, each ``test_every``-th file in sorted order is a test image of that site. Names that
    begin with a dot are ignored.

    Args:
        root: The folder of the sites.
        image_size: Side of the images in pixels.
        test_every: 5 makes a fifth of the images test images.
        channels: 3 for colours, 1 for grey.

    Raises:
        FileNotFoundError: If there is no folder of a site, or no image in it.
    """

    def __init__(self, root: str, image_size: int, test_every: int = 5, channels: int = 3) -> None:
        super().__init__(image_size, channels)
        if test_every < 2:
            raise ValueError(f"data.dataset: test_every of SiteFolders is {test_every}: give 2 or more")
        self.root = root
        self.test_every = test_every

    def folder_of_images(self) -> Path:
        """The folder of the sites."""
        return Path(self.root)

    def list_images(self) -> dict[str, list[ListedImage]]:
        """Lists the folders; see the base class."""
        lists: dict[str, list[ListedImage]] = {"train": [], "test": []}
        sites = image_files.visible_folders(Path(self.root))
        folders = [folder for site in sites for folder in image_files.visible_folders(site)]
        self._warn_of_empty_sites({site.name for site in sites} - {folder.parent.name for folder in folders})
        for folder in folders:
            for number, path in enumerate(image_files.image_files(folder, "data.dataset"), start=1):
                part = "test" if number % self.test_every == 0 else "train"
                lists[part].append(ListedImage(path, folder.name, folder.parent.name))
        if not (lists["train"] and lists["test"]):
            raise FileNotFoundError(
                f"data.dataset: SiteFolders looked for {str(Path(self.root, '<site>', '<class>'))!r} and found "
                f"{len(lists['train'])} training and {len(lists['test'])} test images; both are needed"
            )
        return lists

    def _warn_of_empty_sites(self, sites: Collection[str]) -> None:
        """Name the folders of sites without a class folder, which are no clients."""
        if sites:
            from lightning.pytorch.utilities import rank_zero_warn  # imported late: it takes seconds

            rank_zero_warn(
                f"data.dataset: SiteFolders found no class folder in {', '.join(sorted(sites))} of {self.root!r}, so "
                "these are no clients; add folders of images, or remove the sites"
            )


def _clients(images: Sequence[ListedImage]) -> list[str] | None:
    ids = [image.client for image in images if image.client is not None]
    return ids if ids else None
