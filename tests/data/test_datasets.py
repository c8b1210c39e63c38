from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_fedssl.data import datasets
from lightning_fedssl.data.datasets import canonical_name, load

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
    names = pickle.dumps({reader.meta["key"]: ["a", "b"]})
    meta_name, meta_md5 = write_checked(folder / reader.meta["filename"], names)
    monkeypatch.setattr(reader, "train_list", [write_checked(folder / "train_part", batch)])
    monkeypatch.setattr(reader, "test_list", [write_checked(folder / "test_part", batch)])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "filename": meta_name, "md5": meta_md5})
    return images


@pytest.mark.parametrize("name", ["CIFAR-10", "cifar10", "Cifar_10", "CIFAR 10"])
def test_names_match_whatever_case_and_hyphens(name: str) -> None:
    assert canonical_name(name) == "cifar10"


def test_an_unknown_name_lists_the_known_ones_and_is_cut() -> None:
    with pytest.raises(ValueError, match=r"is not a known data set; .* one of digits, mnist") as caught:
        canonical_name("nothing" * 1000)
    assert len(str(caught.value)) < 500


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


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "svhn", "stl10"])
def test_missing_files_name_key_path_and_remedy(tmp_path: Path, name: str) -> None:
    root = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError) as caught:
        load(name, root)
    message = str(caught.value)
    for part in ("data.root", name, repr(str(root)), "Looked for", "--data.download true"):
        assert part in message


def test_a_truncated_file_gives_the_same_message(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", random_pixels(12, 28, 28), np.arange(12) % 10)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    for kept in (0, 3, 100, 5000):
        path.write_bytes(path.read_bytes()[:kept] if kept else b"")
        with pytest.raises(FileNotFoundError, match=r"data\.root: mnist was not found, or is damaged"):
            load("mnist", tmp_path)
        write_mnist(tmp_path, "MNIST", random_pixels(12, 28, 28), np.arange(12) % 10)
