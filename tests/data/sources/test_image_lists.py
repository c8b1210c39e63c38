"""Image files in memory and in a cache, listed in a CSV file or in folders of sites."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from lightning_fedssl.data import FederatedDataModule, ImageFolder, ImageTable, NaturalClients, SiteFolders, image_files
from tests.data.helpers import set_up
from tests.toy import toy_semifl, toy_trainer

COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


def write_image(path: Path, colour: tuple[int, int, int], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 55, (10, 12, 3))
    Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as image_folder and SiteFolders read them, and a table of the first one's files."""
    root = tmp_path_factory.mktemp("photos")
    rows: list[dict[str, str]] = []
    for part, count in (("train", 10), ("test", 4)):
        for name, colour in COLOURS.items():
            for number in range(count):
                file = f"{part}/{name}/{number}.png"
                write_image(root / "folder" / file, colour, len(rows))
                rows.append({"file": file, "label": name, "split": part, "site": f"site {number % 3}"})
    for number in range(6):
        write_image(root / "folder" / "new" / f"{number}.png", COLOURS["red"], 1000 + number)
        rows.append({"file": f"new/{number}.png", "label": "", "split": "train", "site": "site 1"})
    write_table(root / "folder" / "table.csv", rows)
    for site in ("north", "south"):
        for name, colour in COLOURS.items():
            for number in range(10):
                write_image(root / "sites" / site / name / f"{number}.png", colour, number)
    return root


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def folder_data(photos: Path, **settings: Any) -> FederatedDataModule:
    return set_up("image_folder", root=str(photos / "folder"), image_size=8, num_clients=3, **settings)


def test_a_table_gives_images_clients_and_images_without_labels(photos: Path, tmp_path: Path) -> None:
    source = ImageTable(str(photos / "folder" / "table.csv"), image_size=8, client_column="site")
    views: dict[str, Any] = {"weak": "flip_crop", "strong": "fixmatch"}
    natural: dict[str, Any] = {"num_clients": 3, "partition": NaturalClients(), "validation": 0}
    data = set_up(source, **views, **natural, cache_dir=str(tmp_path / "cache"))
    assert data.spec.class_names == tuple(COLOURS)
    folder = folder_data(photos, validation=0)
    rows = torch.arange(30)
    assert torch.equal(data.local_data(0, 1).images[rows], folder.local_data(0, 1).images[rows])
    assert torch.equal(data.true_labels(rows), folder.true_labels(rows))
    assert data.true_labels(torch.arange(30, 36)).tolist() == [-1] * 6
    assert set(range(30, 36)) <= set(data.local_data(1, 1).unlabeled.tolist())
    assert not set(range(30, 36)) & set(data.local_data(0, 1).unlabeled.tolist())
    assert data.statistics.unknown_counts is not None
    assert data.statistics.unknown_counts.tolist() == [0, 6, 0]
    assert "of unknown class: 6 images at the clients" in data.statistics.summary()
    assert data.client_test_indices(0).tolist() == [0, 3, 4, 7, 8, 11]  # type: ignore[union-attr]
    assert (data.class_names, data.client_names) == (tuple(COLOURS), ("site 0", "site 1", "site 2"))
    toy_trainer(tmp_path, max_rounds=1).fit(toy_semifl(in_shape=None, num_classes=None, server_epochs=1), data)


def test_a_site_is_a_client_with_test_images_of_its_own(photos: Path, tmp_path: Path) -> None:
    root = shutil.copytree(photos / "sites", tmp_path / "sites")
    source = SiteFolders(str(root), image_size=8)
    data = set_up(source, num_labels=6, partition=NaturalClients(), validation=0)
    assert [len(data.client_test_indices(k)) for k in (0, 1)] == [6, 6]  # type: ignore[arg-type]
    assert data.statistics.sizes.sum() == 48 - 6
    assert data.reading.facts["labels used"].startswith("6 of 48 ")
    (root / "north/unlabeled").mkdir()
    shutil.copy(next((root / "north").rglob("*.png")), root / "north/unlabeled/new.png")
    data = set_up(SiteFolders(str(root), 8), num_labels=6, partition=NaturalClients(), validation=0)
    assert data.class_names == tuple(COLOURS)
    assert data.statistics.unknown_counts is not None
    assert data.statistics.unknown_counts.tolist()[:2] == [1, 0]


@pytest.mark.parametrize("kind", ["folder", "table", "sites"])
def test_predicted_test_images_have_their_file_names(photos: Path, tmp_path: Path, kind: str) -> None:
    made: dict[str, Any] = {
        "folder": lambda: folder_data(photos, max_test_images=4, validation=0),
        "table": lambda: set_up(ImageTable(str(photos / "folder" / "table.csv"), 8), validation=0),
        "sites": lambda: set_up(SiteFolders(str(photos / "sites"), 8), validation=0),
    }
    data = made[kind]()
    files = data.predict_files()
    root = {"folder": photos / "folder", "table": photos / "folder", "sites": photos / "sites"}[kind]
    assert len(files) == len(data.test_labels) == sum(len(labels) for _, labels in data.predict_batches())
    for file, image in zip(files, data._test.images, strict=True):
        assert torch.equal(image_files.read_image(root / file, data.in_shape), image)


BAD_TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("name,label,split\na.png,x,train\n", {}, "has no column 'file'; there are name, label, split"),
    ("file,label,split\na.png,x,train\n", {"client_column": "site"}, "has no column 'site'"),
    ("file,label,split\na.png,x,trian\n", {}, "row 2: the split 'trian' must be one of train"),
    ("file,label,split\n,x,train\n", {}, "row 2: the file ''"),
    ("file,label,split\na.png,,test\n", {}, "row 2: the test image has no label"),
    ("file,label,split\na.png,x,train\n", {}, "found no test images"),
    ("file,label,split,s\na.png,x,train,\n", {"client_column": "s"}, "has no s"),
    ("", {}, "not a CSV file"),
    ("file,label,split\na.png,x,train\n./b/../a.png,y,train\n", {}, "row 3: the file .* must be one that no other"),
    ("file,label,split\na.png,x,train,south\n", {}, "row 2 has 4 values for 3 columns"),
    ("file|label|split\na.png|x|train\n", {}, "which commas or semicolons must separate"),
    ("file,label,split\na.png,x,train\na.bin,x,test\n", {}, "a.bin' is not a readable image"),
    ("file,label,split\na.png,x,train\nb.png,y,test\n", {}, "the class 'y' of '.*b.png' is not among the classes"),
]


@pytest.mark.parametrize(("text", "settings", "message"), BAD_TABLES)
def test_a_table_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    for name in ("a.png", "b.png"):
        write_image(tmp_path / name, (1, 1, 1), 0)
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=f"data.dataset: .*{message}"):
        ImageTable(str(tmp_path / "t.csv"), 8, **settings).load()


def test_an_existing_csv_file_with_an_image_size_is_a_table_of_images(photos: Path, tmp_path: Path) -> None:
    data = set_up(str(photos / "folder" / "table.csv"), image_size=8, num_labels=6)
    assert data.class_names == tuple(COLOURS)
    with pytest.raises(ValueError, match="image_size is for image_folder"):
        FederatedDataModule("digits", image_size=8)
    with pytest.raises(ValueError, match="image_folder needs the side"):
        FederatedDataModule("image_folder")


# Folders by class


def folder_of(root: Path, *files: str) -> None:
    for number, file in enumerate(files):
        write_image(root / file, (number, 0, 0), number)


def test_the_files_of_a_class_are_in_the_order_of_torchvision(tmp_path: Path) -> None:
    """The order numbers the images, so that it determines the partition."""
    names = ("b.PNG", "b/1.bmp", "b-c/1.ppm", "b/d/1.jpeg", "0/1.tif", "Z.jpg")
    folder_of(tmp_path, "train/cat/0.png", "train/dog/0.png", "test/dog/0.png", *(f"test/cat/{name}" for name in names))
    test = ImageFolder(str(tmp_path), 8).load().test
    expected = make_dataset(tmp_path / "test", {"cat": 0, "dog": 1}, IMG_EXTENSIONS)
    assert [str(tmp_path / file) for file in test.files] == [path for path, _ in expected]
    assert test.labels.tolist() == [label for _, label in expected]


def test_a_folder_may_have_validation_images_and_images_without_labels(tmp_path: Path) -> None:
    folder_of(
        tmp_path, *(f"{part}/{n}.png" for part in ("train/cat", "train/dog", "test/cat", "test/dog") for n in range(3)),
        "unlabeled/a.png", "unlabeled/site/b.gif", "unlabeled/.hidden/c.png", "train/.ipynb_checkpoints/0.png",
        "val/dog/0.png",
    )  # fmt: skip

    def made(validation: Any) -> FederatedDataModule:
        data = set_up("image_folder", root=str(tmp_path), image_size=8, num_labels=2, validation=validation)
        assert data.class_names == ("cat", "dog")
        assert data.statistics.unknown_counts is not None
        assert data.statistics.unknown_counts.tolist() == [1, 1]
        assert data.statistics.sizes.sum() == 6 - 2 + 2
        return data

    def validation_labels(data: FederatedDataModule) -> list[int]:
        return [label for _, batch in data.evaluation_batches("validate") for label in batch.tolist()]

    assert validation_labels(made(0.1)) == [1]
    assert validation_labels(made("test")) == [0, 0, 0, 1, 1, 1]


def test_a_folder_without_test_images_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, "train/cat/0.png", "train/dog/0.png")
    with pytest.raises(FileNotFoundError, match="found no test images"):
        FederatedDataModule("image_folder", root=str(tmp_path), image_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 0}, "image_size is 0 and channels 3"),
        ({"image_size": 8, "channels": 2}, "image_size is 8 and channels 2"),
    ],
)
def test_impossible_settings_of_folders_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"data.dataset: {message}"):
        SiteFolders("root", **settings)
