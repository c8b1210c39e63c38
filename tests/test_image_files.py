"""Image files in memory and in a cache, listed in a CSV file or in folders of sites."""

from __future__ import annotations

import csv
import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from PIL import Image
from torch import Tensor

from lightning_fedssl.cli import main
from lightning_fedssl.data import FederatedDataModule, ImageTable, NaturalClients, SiteFolders, image_cache, image_files
from lightning_fedssl.data.mapped_images import MappedImages
from lightning_fedssl.trainer import FederatedTrainer
from tests.cli.helpers import CONFIG
from tests.test_trainer import toy_fedavg
from tests.toy import assert_same, toy_semifl, toy_trainer, weights

FORK = multiprocessing.get_context("fork")
COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


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


VIEWS: dict[str, Any] = {"weak": "crop", "strong": "none"}


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def folder_data(photos: Path, **settings: Any) -> FederatedDataModule:
    defaults: dict[str, Any] = {"root": str(photos / "folder"), "image_size": 8, "num_clients": 3, "num_labels": 6}
    return FederatedDataModule("image_folder", **defaults | settings)


def train(tmp_path: Path, data: FederatedDataModule, **settings: Any) -> dict[str, Tensor]:
    algorithm = toy_semifl(in_shape=None, num_classes=None, server_epochs=1)
    toy_trainer(tmp_path, max_rounds=1, **settings).fit(algorithm, data)
    return weights(algorithm)


def cached_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_cache_gives_the_weights_that_memory_gives(photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data = folder_data(photos, cache_dir=str(cache))
    finals = [train(tmp_path / "a", folder_data(photos)), train(tmp_path / "b", data)]
    assert_same(*finals)
    assert isinstance(data.local_data(0, 1).images, MappedImages)
    made = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    assert len(made) == 2  # training and test images
    assert_same(finals[0], train(tmp_path / "c", folder_data(photos, cache_dir=str(cache))))
    assert made == {path.name: path.stat().st_mtime_ns for path in cache.glob("*.npy")}


def train_on_table(run: Path, folder: Path, cache: str | None, **settings: Any) -> FederatedTrainer:
    """A run on ``folder/scans.csv``, in which two clients have all labels."""
    source = ImageTable(str(folder / "scans.csv"), 8, client_column="site")
    data = FederatedDataModule(
        source, num_clients=2, num_labels="all", label_location="clients", partition=NaturalClients(), validation=0,
        cache_dir=cache and str(run / cache), **VIEWS,
    )  # fmt: skip
    trainer = toy_trainer(run, clients_per_round=2, logger=False, **{"max_rounds": 2} | settings)
    trainer.fit(toy_fedavg(in_shape=None), data, ckpt_path=None if trainer.max_rounds == 1 else "last")
    return trainer


@pytest.fixture(scope="module")
def begun(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one round with a cache, and in ``copy`` a copy of its data."""
    root = tmp_path_factory.mktemp("begun")
    rows = [
        {"file": f"{part}/{name}/{number}.png", "label": name, "split": part, "site": f"site {number % 2}"}
        for part in ("train", "test") for name in COLOURS for number in range(4)
    ]  # fmt: skip
    shutil.copytree(photos / "folder", root / "data")
    write_table(root / "data" / "scans.csv", rows)
    train_on_table(root / "run", root / "data", "cache", max_rounds=1)
    shutil.copytree(root / "data", root / "copy", copy_function=shutil.copyfile)
    return root


def test_a_run_with_a_cache_resumes_on_a_copy_of_its_files(begun: Path, tmp_path: Path) -> None:
    """Their paths and times are others, the images are not."""
    shutil.copytree(begun, tmp_path / "begun")
    assert len(list((tmp_path / "begun/run/cache").glob("*.sha256"))) == 2
    for rounds, cache in enumerate(("cache", "other", None), start=2):
        trainer = train_on_table(tmp_path / "begun/run", tmp_path / "begun/copy", cache, max_rounds=rounds)
        assert trainer.round_index == rounds


def rename_blue(folder: Path) -> None:
    text = (folder / "scans.csv").read_text()
    (folder / "scans.csv").write_text(text.replace(",blue,", ",sky,"))


def correct_a_label(folder: Path) -> None:
    text = (folder / "scans.csv").read_text()
    (folder / "scans.csv").write_text(text.replace("train/red/0.png,red", "train/red/0.png,blue"))


def replace_an_image(folder: Path) -> None:
    write_image(folder / "test/red/1.png", COLOURS["red"], 77)


@pytest.mark.parametrize("cache", ["cache", None])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_blue, r"class names \['blue', 'green', 'red'\], but these data have \['green', 'red', 'sky'\]"),
        (correct_a_label, r"other settings: data\.labels_sha256 [0-9a-f]{16} \(now [0-9a-f]{16}\)"),
        (replace_an_image, r"other settings: data\.images_sha256 [0-9a-f]{16} \(now [0-9a-f]{16}\); use"),
    ],
)
def test_changed_labels_and_files_are_refused_on_resuming(
    begun: Path, tmp_path: Path, change: Callable[[Path], None], message: str, cache: str | None
) -> None:
    if cache is None and change is replace_an_image:
        pytest.skip("images in memory and images in a cache have different hashes, which are not compared")
    shutil.copytree(begun, tmp_path / "begun")
    run, folder = tmp_path / "begun/run", tmp_path / "begun/copy"
    change(folder)
    with pytest.raises(ValueError, match=message):
        train_on_table(run, folder, cache)
    assert train_on_table(run, folder, cache, allow_changed=True).round_index == 2


def test_the_hash_of_cached_images_is_of_their_values_and_is_kept(tmp_path: Path) -> None:
    def opened(name: str, folder: Path = tmp_path) -> MappedImages:
        images: Any = image_cache.open_or_decode(folder, name * 64, slow_rows(-1, []), SHAPE)
        assert isinstance(images, MappedImages)
        return images

    first = opened("0").content_hash()
    assert first == opened("1").to("cpu").content_hash() == MappedImages(opened("0").values).content_hash()
    kept = tmp_path / f"{'0' * 32}.sha256"
    assert kept.read_text() == first
    kept.write_text("f" * 64)
    assert opened("0").content_hash() == "f" * 64  # it is read
    kept.write_text(first[:20])  # a process that writes it at this moment
    assert opened("0").content_hash() == first == kept.read_text()
    (tmp_path / f"{'0' * 32}.npy").unlink()
    kept.write_text("f" * 64)
    assert opened("0").content_hash() == first  # the file was made again
    kept.unlink()
    kept.mkdir()
    assert opened("0").content_hash() == first  # it cannot be written


def test_two_ranks_share_a_cache(photos: Path, tmp_path: Path) -> None:
    def cached(name: str) -> FederatedDataModule:
        return folder_data(photos, cache_dir=str(tmp_path / name))

    one = train(tmp_path / "one", cached("first"), precision="64-true")
    two = train(tmp_path / "two", cached("second"), precision="64-true", strategy="ddp_fork", devices=2)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-9, atol=1e-9)
    assert len(list((tmp_path / "second").glob("*.npy"))) == 2


def test_a_changed_file_or_setting_makes_another_cache(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        write_image(path, (9, 9, 9), 0)
    cache = tmp_path / "cache"
    before = image_files.read_images(paths, (3, 8, 8), str(cache))
    image_files.read_images(paths, (3, 4, 4), str(cache))
    write_image(paths[1], (99, 9, 9), 1)
    after = image_files.read_images(paths, (3, 8, 8), str(cache))
    assert len(list(cache.glob("*.npy"))) == 3
    assert torch.equal(before[0], after[0])
    assert torch.equal(after[1], image_files.read_image(paths[1], (3, 8, 8)))
    assert not torch.equal(before[1], after[1])


def slow_rows(killed_at: int, decoded: list[int]) -> Any:
    """Reads rows that hold their number; kills its process at one of them."""

    def read(row: int) -> Tensor:
        if row == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        decoded.append(row)
        return torch.full((1, 2, 2), row % 251, dtype=torch.uint8)

    return read


SHAPE = (20, 1, 2, 2)


def interrupted(folder: Path, fingerprint: str) -> None:
    process = FORK.Process(target=image_cache.open_or_decode, args=(folder, fingerprint, slow_rows(13, []), SHAPE))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_run_resumes_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "_CHUNK", 4)
    fingerprint = "0" * 64
    interrupted(tmp_path, fingerprint)
    assert cached_files(tmp_path) == [f"{'0' * 32}.partial.npy", f"{'0' * 32}.rows"]
    decoded: list[int] = []
    images = image_cache.open_or_decode(tmp_path, fingerprint, slow_rows(-1, decoded), SHAPE)
    assert sorted(decoded) == list(range(12, 20))
    assert images[torch.arange(20)][:, 0, 0, 0].tolist() == list(range(20))
    assert cached_files(tmp_path) == [f"{'0' * 32}.npy"]


def test_a_count_of_images_whose_file_was_removed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user removes the file, and the next run is killed at its first image: the run after it must decode all."""
    monkeypatch.setattr(image_cache, "_CHUNK", 5)
    fingerprint = "4" * 64
    (tmp_path / f"{'4' * 32}.rows").write_text(str(SHAPE[0]))
    process = FORK.Process(target=image_cache.open_or_decode, args=(tmp_path, fingerprint, slow_rows(0, []), SHAPE))
    process.start()
    process.join()
    decoded: list[int] = []
    image_cache.open_or_decode(tmp_path, fingerprint, slow_rows(-1, decoded), SHAPE)
    assert sorted(decoded) == list(range(SHAPE[0]))


def test_leftovers_of_a_killed_run_are_removed_unless_a_process_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "_CHUNK", 4)
    interrupted(tmp_path, "0" * 64)
    interrupted(tmp_path, "1" * 64)
    assert cached_files(tmp_path) == [f"{'1' * 32}.partial.npy", f"{'1' * 32}.rows"]
    with FileLock(tmp_path / f"{'1' * 32}.lock"):
        image_cache.open_or_decode(tmp_path, "2" * 64, slow_rows(-1, []), SHAPE)
        assert f"{'1' * 32}.partial.npy" in cached_files(tmp_path)
    image_cache.open_or_decode(tmp_path, "3" * 64, slow_rows(-1, []), SHAPE)
    assert cached_files(tmp_path) == [f"{'2' * 32}.npy", f"{'3' * 32}.npy"]


def test_a_damaged_cache_and_an_unusable_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / f"{'0' * 32}.npy").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"data\.cache_dir: '.*000\.npy' is damaged .*; delete the file"):
        image_cache.open_or_decode(tmp_path, "0" * 64, slow_rows(-1, []), SHAPE)
    with pytest.raises(OSError, match=r"data\.cache_dir: .* GB of decoded images cannot be written to '/dev/null/x'"):
        image_cache.open_or_decode(Path("/dev/null/x"), "0" * 64, slow_rows(-1, []), SHAPE)
    with pytest.raises(OSError, match=r"data\.cache_dir: 1e\+09 GB .*free space, or choose another folder"):
        image_cache.open_or_decode(tmp_path, "1" * 64, slow_rows(-1, []), (10**18, 1, 1, 1))


def test_mapped_images_give_what_a_tensor_gives() -> None:
    values = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2)
    images, rows = MappedImages(values), torch.tensor([4, 0, 4])
    assert torch.equal(images.index_select(0, rows), values[rows])
    assert torch.equal(images[rows], values[rows])
    assert torch.equal(images[1:3], values[1:3])
    assert (len(images), images.shape, images.dtype) == (6, values.shape, torch.uint8)
    moved = images.to("meta")
    assert moved.index_select(0, rows).device.type == moved[0].device.type == "meta"


def test_a_cache_is_refused_where_nothing_is_decoded() -> None:
    with pytest.raises(ValueError, match=r"data\.cache_dir: digits is held in memory; leave it out"):
        FederatedDataModule("digits", cache_dir="x")


def test_a_table_gives_images_clients_and_images_without_labels(photos: Path, tmp_path: Path) -> None:
    source = ImageTable(str(photos / "folder" / "table.csv"), image_size=8, client_column="site")
    data = FederatedDataModule(
        source, weak="flip_crop", strong="fixmatch", num_clients=3, num_labels=6, partition=NaturalClients(),
        validation=0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    data.setup()
    assert data.spec.class_names == tuple(COLOURS)
    folder = folder_data(photos, validation=0)
    folder.setup()
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
    train(tmp_path, data)


def test_a_site_is_a_client_with_test_images_of_its_own(photos: Path) -> None:
    source = SiteFolders(str(photos / "sites"), image_size=8)
    data = FederatedDataModule(
        source, weak="crop", strong="none", num_clients=2, num_labels=6, partition=NaturalClients(), validation=0
    )
    data.setup()
    assert [len(data.client_test_indices(k)) for k in (0, 1)] == [6, 6]  # type: ignore[arg-type]
    assert data.statistics.sizes.sum() == 48 - 6


def test_hidden_folders_are_neither_sites_nor_classes(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "sites", tmp_path / "sites")
    shutil.copytree(photos / "sites" / "north" / "red", tmp_path / "sites" / "north" / ".ipynb_checkpoints")
    shutil.copytree(photos / "sites" / "north", tmp_path / "sites" / ".Trash")
    found, expected = (SiteFolders(str(root / "sites"), image_size=8) for root in (tmp_path, photos))
    assert found.describe() == expected.describe()
    for part, images in expected.list_images().items():
        names = [(image.label, image.client, image.path.relative_to(photos)) for image in images]
        assert [(i.label, i.client, i.path.relative_to(tmp_path)) for i in found.list_images()[part]] == names


def test_linked_folders_are_read_and_those_that_lead_back_are_not(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "photos").symlink_to(photos / "sites" / "north" / "red")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    found = [path.relative_to(tmp_path).as_posix() for path in image_files.image_files(tmp_path)]
    assert found == [f"a/photos/{number}.png" for number in range(10)]


def test_sites_without_a_class_folder_are_named_once(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "sites", tmp_path / "sites")
    for name in ("west", "east", ".hidden"):
        (tmp_path / "sites" / name).mkdir()
    source = SiteFolders(str(tmp_path / "sites"), image_size=8)
    with pytest.warns(UserWarning, match=r"found no class folder in east, west of '.*sites', so these are no clients"):
        source.describe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source.load().train.client_ids is not None
        SiteFolders(str(photos / "sites"), image_size=8).describe()


@pytest.mark.parametrize("kind", ["folder", "table", "sites"])
def test_predicted_test_images_have_their_file_names(photos: Path, tmp_path: Path, kind: str) -> None:
    made: dict[str, Any] = {
        "folder": lambda: folder_data(photos, max_test_images=4, validation=0),
        "table": lambda: FederatedDataModule(
            ImageTable(str(photos / "folder" / "table.csv"), 8), num_clients=3, num_labels=6, validation=0, **VIEWS
        ),
        "sites": lambda: FederatedDataModule(
            SiteFolders(str(photos / "sites"), 8), num_clients=3, num_labels=6, validation=0, **VIEWS
        ),
    }
    data = made[kind]()
    data.setup()
    files = data.predict_files()
    root = {"folder": photos / "folder", "table": photos / "folder", "sites": photos / "sites"}[kind]
    assert len(files) == len(data.test_labels) == sum(len(labels) for _, labels in data.predict_batches())
    for file, image in zip(files, data._test.images, strict=True):
        assert torch.equal(image_files.read_image(root / file, data.in_shape), image)


BAD_TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("name,label,split\na.png,x,train\n", {}, r"has no column 'file' \(file_column\); there are name, label, split"),
    ("file,label,split\na.png,x,train\n", {"client_column": "site"}, r"no column 'site' \(client_column\)"),
    ("file,label,split\na.png,x,trian\n", {}, r"line 2: the split is 'trian'; a split is one of train, test, valid"),
    ("file,label,split\n,x,train\n", {}, "line 2: there is no file name; complete the row"),
    ("file,label,split\na.png,,test\n", {}, "line 2: the test image 'a.png' has no label; complete the"),
    ("file,label,split\na.png,x,train\n", {}, "has no image with test in its column 'split'"),
    ("file,label,split,s\na.png,x,train,\n", {"client_column": "s"}, "'a.png' has no client in the column 's'"),
    ("", {}, r"has no column 'file' .*; the file is empty$"),
    ("file,label,split\na.png,x,train\nb.png,x,train\na.png,y,train\n", {}, "lines 2 and 4: both list 'a.png', but an"),
    ("file,label,split\na.png,x,train\n./b/../a.png,,unlabeled\n", {}, "lines 2 and 3: both list .* keep one of the"),
    ("file,label,split,s\na.png,x,train,1\na.png,x,train,2\n", {"client_column": "s"}, "lines 2 and 3: both list 'a"),
    ("file,label,split\na.png,x,train\nb.png,x,train,south\n", {}, "line 3: 'south' is beyond the last column: quote"),
    ("file;label;split\na.png;x;train\n", {}, "its columns are separated by semicolons: separate them by commas"),
]


@pytest.mark.parametrize(("text", "settings", "message"), BAD_TABLES)
def test_a_table_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"data\.dataset: .*t\.csv'.*{message}"):
        ImageTable(str(tmp_path / "t.csv"), 8, **settings).describe()


def test_a_file_in_the_place_of_a_folder_is_called_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"data\.predict_root: '.*a\.txt' is a file; give a folder of images"):
        image_files.image_files(tmp_path / "a.txt")


def test_files_and_classes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", (1, 1, 1), 0)
    (tmp_path / "t.csv").write_text("file,label,split\na.png,x,train\nb.png,x,test\n")
    with pytest.raises(ValueError, match=r"data\.dataset: there is no file '.*b\.png'; correct its name, or the fold"):
        ImageTable(str(tmp_path / "t.csv"), 8).load()
    write_image(tmp_path / "b.png", (1, 1, 1), 1)
    (tmp_path / "t.csv").write_text("file,label,split\na.png,x,train\nb.png,y,test\n")
    with pytest.raises(ValueError, match=r"the class 'y' of '.*b\.png' is not among the classes of the training"):
        ImageTable(str(tmp_path / "t.csv"), 8).load()
    (tmp_path / "t.csv").write_text("file,label,split\na.png,x,train,\nb.png,x,test, \n")  # empty fields are no harm
    table = ImageTable(str(tmp_path / "t.csv"), 8)
    with pytest.raises(ValueError, match=r"data\.dataset: the training images have one class \(x\); two are needed"):
        FederatedDataModule(table, weak="crop", strong="none", num_clients=1, num_labels=1).setup()
    with pytest.raises(FileNotFoundError, match=r"the CSV file 'nowhere\.csv' does not exist"):
        ImageTable("nowhere.csv", 8).describe()
    with pytest.raises(FileNotFoundError, match=r"SiteFolders looked for '.*<site>/<class>' and found 0 training"):
        SiteFolders(str(tmp_path), 8).describe()
    with pytest.raises(ValueError, match="image_size is 0 and channels 3"):
        ImageTable("t.csv", 0)
    with pytest.raises(ValueError, match="test_every of SiteFolders is 1"):
        SiteFolders("x", 8, test_every=1)


def test_a_table_and_a_cache_can_be_given_on_the_command_line_and_by_the_environment(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_PARTITION__DATA__CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    options = {
        "dataset": "ImageTable", "dataset.csv_file": str(photos / "folder" / "table.csv"), "dataset.image_size": "8",
        "dataset.client_column": "site", "partition": "NaturalClients", "num_clients": "3", "num_labels": "6",
        "weak": "crop", "strong": "none", "validation": "0",
    }  # fmt: skip
    arguments = [part for key, value in options.items() for part in (f"--data.{key}", value)]
    assert main(["partition", "--config", "run.yaml", *arguments]) == 0, capsys.readouterr().err
    assert "of unknown class: 6 images" in capsys.readouterr().out
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2
