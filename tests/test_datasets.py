from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from lightning_fedssl.data import FederatedDataModule, datasets, image_files
from lightning_fedssl.data.datasets import check_images, check_labels, describe, load, load_validation

DATA_ROOT = os.environ.get("FEDSSL_DATA_ROOT", "")
needs_data = pytest.mark.skipif(not DATA_ROOT, reason="FEDSSL_DATA_ROOT names no data folder")

Pixels = NDArray[Any]


def random_pixels(*shape: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_idx(path: Path, array: Pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(root: Path, folder: str, images: Pixels, labels: Pixels) -> None:
    for part in ("train", "t10k"):
        write_idx(root / folder / "raw" / f"{part}-images-idx3-ubyte", images)
        write_idx(root / folder / "raw" / f"{part}-labels-idx1-ubyte", labels)


def write_checked(path: Path, content: bytes) -> tuple[str, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path.name, hashlib.md5(content, usedforsecurity=False).hexdigest()


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, labels: list[int]) -> Pixels:
    """One training and one test batch, and torchvision told of their sums."""
    import torchvision.datasets as tv

    reader: Any = getattr(tv, kind)
    images = random_pixels(len(labels), 3, 32, 32)
    key = "labels" if kind == "CIFAR10" else "fine_labels"
    batch = pickle.dumps({"data": images.reshape(len(labels), -1), key: labels})
    folder = root / reader.base_folder
    meta_name, meta_md5 = write_checked(
        folder / reader.meta["filename"], pickle.dumps({reader.meta["key"]: ["a", "b"]})
    )
    monkeypatch.setattr(reader, "train_list", [write_checked(folder / "train_part", batch)])
    monkeypatch.setattr(reader, "test_list", [write_checked(folder / "test_part", batch)])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "filename": meta_name, "md5": meta_md5})
    return images


def write_image_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog"), size: tuple[int, int] = (8, 8)) -> None:
    for part in ("train", "test"):
        for level, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", size, (level * 40, number, 200)).save(root / part / name / f"{number}.png")


@pytest.mark.parametrize("name", ["CIFAR-10", "cifar10", "Cifar_10", "CIFAR 10"])
def test_names_match_whatever_case_and_hyphens(name: str) -> None:
    assert describe(name).name == "cifar10"


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"data\.dataset: 'nothing' is not a known data set; choose one of digits, mnist"
    ):
        describe("nothing")


def test_every_specification_is_consistent() -> None:
    for name, spec in datasets.SPECS.items():
        assert name == spec.name
        assert len(spec.class_names) == spec.num_classes == len(set(spec.class_names))
        assert len(spec.mean) == len(spec.std) == spec.in_shape[0]


def test_emnist_classes_are_those_of_torchvision() -> None:
    import torchvision.datasets as tv

    assert list(datasets.SPECS["emnist"].class_names) == tv.EMNIST.classes_split_dict["balanced"]


def test_digits_split_is_stratified_and_complete() -> None:
    spec, train, test = load("digits")
    assert (len(train.labels), len(test.labels)) == (1442, 355)
    assert train.images.dtype == torch.uint8
    assert train.images.shape[1:] == spec.in_shape
    total = (train.labels.bincount() + test.labels.bincount()).double()
    assert ((test.labels.bincount() / total) - 0.2).abs().max() < 0.01
    assert int(train.images.max()) == 255


def test_digits_constants_are_those_of_the_training_images() -> None:
    spec, train, _ = load("digits")
    pixels = train.images.double() / 255
    assert spec.mean[0] == pytest.approx(float(pixels.mean()), abs=1e-4)
    assert spec.std[0] == pytest.approx(float(pixels.std()), abs=1e-4)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_formats_are_read(tmp_path: Path, name: str, folder: str) -> None:
    images, labels = random_pixels(12, 28, 28), np.arange(12) % 10
    write_mnist(tmp_path, folder, images, labels)
    spec, train, test = load(name, tmp_path)
    assert spec.num_classes == 10
    for split in (train, test):
        assert np.array_equal(split.images[:, 0].numpy(), images)
        assert split.labels.tolist() == labels.tolist()
        assert split.labels.dtype == torch.int64


def test_emnist_stands_upright(tmp_path: Path) -> None:
    images, labels = random_pixels(47, 28, 28), np.arange(47)
    for part in ("train", "test"):
        write_idx(tmp_path / "EMNIST" / "raw" / f"emnist-balanced-{part}-images-idx3-ubyte", images)
        write_idx(tmp_path / "EMNIST" / "raw" / f"emnist-balanced-{part}-labels-idx1-ubyte", labels)
    _, train, _ = load("emnist", tmp_path)
    assert train.images.shape == (47, 1, 28, 28)
    assert np.array_equal(train.images[:, 0].numpy(), images.transpose(0, 2, 1))


@pytest.mark.parametrize(("name", "kind", "top"), [("cifar10", "CIFAR10", 9), ("cifar100", "CIFAR100", 99)])
def test_cifar_formats_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, top: int
) -> None:
    images = write_cifar(tmp_path, monkeypatch, kind, [0, 3, top])
    _, train, test = load(name, tmp_path)
    assert np.array_equal(train.images.numpy(), images)
    assert test.labels.tolist() == [0, 3, top]
    assert train.images.is_contiguous()


def test_svhn_format_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.io
    import torchvision.datasets as tv

    images = random_pixels(4, 3, 32, 32)
    sources = {}
    for part in ("train", "test"):
        path = tmp_path / f"{part}_32x32.mat"
        scipy.io.savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": np.array([[10], [1], [2], [9]])})
        sources[part] = ["", path.name, hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()]
    monkeypatch.setattr(tv.SVHN, "split_list", sources)
    _, train, test = load("svhn", tmp_path)
    assert np.array_equal(train.images.numpy(), images)
    assert test.labels.tolist() == [0, 1, 2, 9]


def test_stl10_reads_the_labelled_splits_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets as tv

    images, folder = random_pixels(2, 3, 96, 96), tmp_path / "stl10_binary"
    pixels, labels = images.transpose(0, 1, 3, 2).tobytes(), bytes([1, 10])
    train_files = [write_checked(folder / "train_X.bin", pixels), write_checked(folder / "train_y.bin", labels)]
    monkeypatch.setattr(tv.STL10, "train_list", [*train_files, write_checked(folder / "unlabeled_X.bin", pixels)])
    test_files = [write_checked(folder / "test_X.bin", pixels), write_checked(folder / "test_y.bin", labels)]
    monkeypatch.setattr(tv.STL10, "test_list", test_files)
    _, train, test = load("STL-10", tmp_path)
    assert np.array_equal(train.images.numpy(), images)
    assert train.labels.tolist() == test.labels.tolist() == [0, 9]


def test_image_folder_is_described_without_reading_and_read_in_class_order(tmp_path: Path) -> None:
    write_image_folder(tmp_path, ("dog", "ant", "cat"), size=(20, 10))
    spec = describe("image_folder", tmp_path, image_size=6)
    assert (spec.num_classes, spec.in_shape, spec.class_names) == (3, (3, 6, 6), ("ant", "cat", "dog"))
    _, train, test = load("ImageFolder", tmp_path, image_size=6)
    assert train.images.shape == (9, 3, 6, 6)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert test.images[:, 0, 3, 3].tolist() == [40] * 3 + [80] * 3 + [0] * 3


def test_the_files_of_a_class_are_in_the_order_of_torchvision(tmp_path: Path) -> None:
    """The order numbers the images, so that it determines the partition."""
    write_image_folder(tmp_path / "data")
    for number, name in enumerate(("b.PNG", "b/1.bmp", "b-c/1.ppm", "b/d/1.jpeg", "0/1.tif", "Z.jpg")):
        path = tmp_path / "data" / "test" / "cat" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (0, 100 + number, 0)).save(path)
    shutil.copytree(tmp_path / "data" / "test" / "cat" / "b", tmp_path / "linked")
    (tmp_path / "data" / "test" / "dog" / "link").symlink_to(tmp_path / "linked")
    _, _, test = load("image_folder", tmp_path / "data", image_size=8)
    expected = make_dataset(tmp_path / "data" / "test", {"cat": 0, "dog": 1}, IMG_EXTENSIONS)
    assert len(expected) == 6 + 6 + 2
    assert [str(tmp_path / "data" / file) for file in test.files] == [path for path, _ in expected]
    assert test.labels.tolist() == [label for _, label in expected]


def test_class_folders_are_read_as_images_without_labels_are(tmp_path: Path) -> None:
    """With GIF files, and without hidden files and folders, such as those of macOS."""
    write_image_folder(tmp_path)
    for part in ("train/cat", "test/cat", "validation/cat", "unlabeled"):
        (tmp_path / part / ".ipynb_checkpoints").mkdir(parents=True)
        (tmp_path / part / "._5.png").write_bytes(b"no image")
        for name in ("9.gif", ".ipynb_checkpoints/1.png"):
            Image.new("RGB", (8, 8), (255, 0, 0)).save(tmp_path / part / name)
    spec, train, test = load("image_folder", tmp_path, image_size=8)
    validation = load_validation(tmp_path, replace(spec, class_names=("cat", "dog")))
    assert train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, -1]
    assert test.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert validation is not None
    for split, row in ((train, 3), (train, 7), (test, 3), (validation, 0)):
        assert split.images[row, :, 0, 0].tolist() == [255, 0, 0]
    assert len(validation.labels) == 1


def test_a_broken_link_in_the_place_of_an_image_is_named(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "train" / "dog" / "9.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"data\.root: .*dog/9\.png' is no regular file; replace or remove it"):
        load("image_folder", tmp_path, image_size=8)


def test_image_folder_needs_train_and_test(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "ok")
    (tmp_path / "ok" / "test").rename(tmp_path / "ok" / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"data\.root: image_folder looked for .*test.*must hold the folders train"
    ):
        describe("image_folder", tmp_path / "ok", image_size=8)


def test_image_folder_with_other_test_classes_is_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "test" / "owl").mkdir()
    message = "only test has owl: add images of owl to train, or remove the folder$"
    with pytest.raises(ValueError, match=message):
        describe("image_folder", tmp_path, image_size=8)
    for name in ("hen", "kite"):
        (tmp_path / "train" / name).mkdir()
    message = f"only train has hen, kite: add images of hen, kite to test, or remove the folders; {message}"
    with pytest.raises(ValueError, match=message):
        describe("image_folder", tmp_path, image_size=8)


def test_image_folder_with_an_empty_class_is_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / "owl").mkdir()
    with pytest.raises(FileNotFoundError, match=r"data\.root.*owl"):
        load("image_folder", tmp_path, image_size=8)


def test_images_without_labels_in_a_folder_go_to_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    write_image_folder(tmp_path)
    for name in ("unlabeled/a.png", "unlabeled/site/b.png", "unlabeled/.hidden/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / name)
    for part in ("train", "test"):
        (tmp_path / part / ".ipynb_checkpoints").mkdir()
    _, train, test = load("image_folder", tmp_path, image_size=8)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert train.images[-1, :, 0, 0].tolist() == [1, 2, 3]
    assert test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    for cache in (None, str(tmp_path / "cache")):
        data = FederatedDataModule(
            "image_folder", root=str(tmp_path), image_size=8, num_clients=2, num_labels=2, validation=0, cache_dir=cache
        )
        data.setup()
        assert "of unknown class: 2 images at the clients" in data.statistics.summary()
        assert data.statistics.sizes.sum() == 6 - 2 + 2


@pytest.mark.parametrize("name", ["validation", "val"])
def test_validation_images_of_a_folder_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    write_image_folder(tmp_path)
    second = describe("image_folder", tmp_path, image_size=8).class_names[1]
    (tmp_path / name / second).mkdir(parents=True)
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / name / second / "a.png")

    def labels(validation: Any) -> list[int]:
        data = FederatedDataModule(
            "image_folder", root=str(tmp_path), image_size=8, num_clients=2, num_labels=2, validation=validation
        )
        data.setup()
        assert data.statistics.sizes.sum() == 6 - 2
        return [label for _, batch in data.evaluation_batches("validate") for label in batch.tolist()]

    assert labels(0.1) == [1]
    assert labels("test") == [0, 0, 0, 1, 1, 1]
    assert labels(0) == []


def test_validation_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    spec = describe("image_folder", tmp_path, image_size=8)
    assert load_validation(tmp_path, spec) is None
    (tmp_path / "val").mkdir()
    with pytest.raises(FileNotFoundError, match=r"data\.root: image_folder found no class folder in '.*val'; give one"):
        load_validation(tmp_path, spec)
    (tmp_path / "val" / "owl").mkdir()
    with pytest.raises(
        ValueError, match=r"data\.root: '.*val' has the class owl, which the folder train does not have"
    ):
        load_validation(tmp_path, spec)
    (tmp_path / "validation").mkdir()
    with pytest.raises(ValueError, match=r"data\.root: .* has the folders validation and val; keep one of them"):
        load_validation(tmp_path, spec)


def test_unreadable_image_is_named(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "train" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"data\.root: .*1\.png' is not a readable image"):
        load("image_folder", tmp_path, image_size=8)


def test_image_size_is_for_image_folder_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.image_size: image_folder needs"):
        describe("image_folder", tmp_path)
    with pytest.raises(ValueError, match=r"data\.image_size: cifar10 has a fixed size"):
        describe("cifar10", tmp_path, image_size=16)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "svhn", "stl10"])
def test_missing_files_name_key_path_and_remedy(tmp_path: Path, name: str) -> None:
    root = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as caught:
        load(name, root)
    message = str(caught.value)
    for part in ("data.root", name, repr(str(root)), "does not exist", "Looked for", "--data.download true"):
        assert part in message
    assert not root.exists()


def test_corrupt_file_gives_the_same_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch, "CIFAR10", [0, 1])
    (tmp_path / "cifar-10-batches-py" / "train_part").write_bytes(b"cut")
    with pytest.raises(FileNotFoundError, match=r"data\.root: cifar10 was not found, or is damaged.*not complete"):
        load("cifar10", tmp_path)


def test_truncated_idx_file_gives_the_same_message(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", random_pixels(12, 28, 28), np.arange(12) % 10)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    for kept in (0, 3, 100, 5000):
        path.write_bytes(path.read_bytes()[:kept] if kept else b"")
        with pytest.raises(FileNotFoundError, match=r"data\.root: mnist was not found, or is damaged"):
            load("mnist", tmp_path)
        write_mnist(tmp_path, "MNIST", random_pixels(12, 28, 28), np.arange(12) % 10)


def test_failed_download_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets as tv

    def fail(self: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(tv.CIFAR10, "download", fail)
    with pytest.raises(FileNotFoundError, match=r"the download failed.*no route to host"):
        load("cifar10", tmp_path, download=True)


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", random_pixels(12, 28, 28), np.arange(12))
    with pytest.raises(
        ValueError, match=r"mnist: class count mismatch: labels run from 0 to 11, but the 10 classes are"
    ):
        load("mnist", tmp_path)
    with pytest.raises(ValueError, match="there is a label -1, and classes are numbered from 0"):
        check_labels(torch.tensor([-1, 0]), 3, "x")


def test_images_of_numbers_from_0_to_1_are_refused_instead_of_rounded_to_black() -> None:
    with pytest.raises(ValueError, match="numbers from 0 to 1, and 8-bit images have 0"):
        check_images(torch.rand(2, 1, 3, 3), "x")
    assert check_images(torch.rand(2, 1, 3, 3) * 255, "x").max() > 1
    assert torch.equal(check_images(torch.eye(3)[None, None], "x"), torch.eye(3, dtype=torch.uint8)[None, None])


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", random_pixels(12, 20, 28), np.arange(12) % 10)
    with pytest.raises(ValueError, match=r"mnist: images are \(1, 20, 28\), expected \(1, 28, 28\)"):
        load("mnist", tmp_path)


def test_number_of_labels_must_fit(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", random_pixels(12, 28, 28), np.arange(11) % 10)
    with pytest.raises(ValueError, match="mnist: 12 images but 11 labels"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_images_are_refused_by_name(value: float) -> None:
    images = torch.zeros(5, 1, 2, 2)
    images[3, 0, 1, 1] = value
    with pytest.raises(ValueError, match=r"data\.dataset scans: 1 of 5 images hold NaN or infinite.*first is image 3"):
        check_images(images, "scans")


def test_other_odd_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pixel values 0\.\.300 are outside 0\.\.255"):
        check_images(torch.tensor([0.0, 300.0]).view(1, 1, 1, 2), "scans")
    with pytest.raises(ValueError, match=r"expected images \(N, channels, height, width\)"):
        check_images(torch.zeros(3, 8, 8), "scans")
    with pytest.raises(ValueError, match="expected images"):
        check_images(torch.zeros(0, 1, 8, 8), "scans")


def test_float_images_are_rounded_to_uint8() -> None:
    images = check_images(torch.tensor([0.4, 1.6, 254.7, 255.0]).view(1, 1, 2, 2), "scans")
    assert images.dtype == torch.uint8
    assert images.flatten().tolist() == [0, 2, 255, 255]


@needs_data
@pytest.mark.parametrize(
    ("name", "train_counts", "pixel_sums"),
    [
        ("mnist", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], [0.13066]),
        ("fashion_mnist", [6000] * 10, [0.28604]),
        ("cifar10", [5000] * 10, [0.49140, 0.48216, 0.44653]),
    ],
)
def test_real_copies_are_read(name: str, train_counts: list[int], pixel_sums: list[float]) -> None:
    spec, train, test = load(name, DATA_ROOT)
    assert train.labels.bincount().tolist() == train_counts
    assert len(test.labels) == 10000
    means = train.images.float().mean(dim=(0, 2, 3)) / 255
    assert means.tolist() == pytest.approx(pixel_sums, abs=2e-5)
    assert means.tolist() == pytest.approx(spec.mean, abs=2e-4)


def test_sixteen_bit_images_are_scaled_by_their_range(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    pixels = image_files.read_image(str(tmp_path / "ramp.png"), (3, 8, 8))
    assert pixels[0].tolist() == np.rint(ramp / 257).astype(int).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_without_a_fixed_range_are_refused(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "values.tiff"
    Image.fromarray(np.ones((8, 8), dtype)).save(path)
    with pytest.raises(ValueError, match=r"values\.tiff' is not a readable image \(mode [FI]: 32-bit values have no"):
        image_files.read_image(str(path), (3, 8, 8))
