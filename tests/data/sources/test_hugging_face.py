"""Rows with named columns, and the library ``datasets``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from lightning_fedssl.data import Columns, Datasets
from lightning_fedssl.data.image_files import read_image
from tests.data.helpers import set_up


class Feature:
    names = ("a", "b")


class Found(list[Any]):
    @property
    def features(self) -> Any:
        return {"label": Feature}


class Library:
    """A stand-in for the library ``datasets``."""

    @staticmethod
    def load_dataset(path: str, config: str | None, split: str) -> Any:
        assert (path, config) == ("hub/name", "small")
        return Found({"values": [float(k), 1.0], "label": k % 2, "site": f"w{k % 3}"} for k in range(len(split)))


def test_names_on_the_hub_are_read_with_their_classes_and_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Library)
    parts = [Columns("hub/name", split, "small", "values", client="site") for split in ("training", "test")]
    loaded = Datasets(*parts).load()  # type: ignore[arg-type]
    assert loaded.spec.class_names == ("a", "b")
    assert loaded.spec.client_names == ("w0", "w1", "w2")
    assert loaded.train.images.tolist() == [[float(k), 1.0] for k in range(8)]
    assert loaded.train.labels.tolist() == [0, 1] * 4


def test_the_real_library_is_read(tmp_path: Path) -> None:
    real = pytest.importorskip("datasets")
    rows = [{"values": [0.0, float(k)], "label": k % 2} for k in range(12)]
    split = real.Dataset.from_list(rows).cast_column("label", real.ClassLabel(names=["a", "b"]))
    real.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    part = Columns(str(tmp_path / "saved"), "train", sample="values")
    loaded = Datasets(part, part).load()
    assert loaded.train.images.tolist() == [row["values"] for row in rows]
    assert loaded.spec.class_names == ("a", "b")


def test_columns_adapt_rows_from_python() -> None:
    rows = [{"x": [float(k), 1.0], "y": k % 2} for k in range(20)]
    columns = Columns(rows, sample="x", label="y")
    data = set_up(Datasets(columns, columns, Columns(rows, sample="x", label=None)))
    assert data.local_data(0, 1).images.shape == (40, 2)


@pytest.mark.parametrize("mode", ["P", "1", "L", "RGB"])
def test_pictures_of_every_mode_become_brightness(mode: str) -> None:
    """The values of a palette's picture are numbers of colours, and those of a bitmap are true or false."""
    picture = Image.new("RGB", (2, 2), (255, 255, 255)).convert(mode)
    sample, label = Columns([{"image": picture, "label": 1}])[0]
    assert sample.dtype == torch.uint8
    assert sample.shape == ((3 if mode in ("P", "RGB") else 1), 2, 2)
    assert sample.min() == 255
    assert label == 1


@pytest.mark.parametrize("kind", ["picture", "bytes", "dict", "path", "dict of a path"])
def test_pictures_that_are_not_decoded_are_read_upright(tmp_path: Path, kind: str) -> None:
    picture = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    exif = picture.getexif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned to the right
    path = tmp_path / "x.png"
    picture.save(path, exif=exif)
    value: Any = {
        "picture": Image.open(path), "bytes": path.read_bytes(), "dict": {"bytes": path.read_bytes(), "path": None},
        "path": str(path), "dict of a path": {"bytes": None, "path": str(path)},
    }[kind]  # fmt: skip
    sample, _ = Columns([{"image": value, "label": 1}])[0]
    assert sample.tolist() == [[[3, 0], [4, 1], [5, 2]]]


def test_a_row_that_is_no_sample_is_named() -> None:
    columns = Columns([{"x": [1.0, 2.0], "label": 0}, {"x": [1.0, None], "label": 1}], sample="x")
    for bad in (columns, Columns([{"x": "nothing.png", "label": 0}] * 2, sample="x")):
        with pytest.raises(ValueError, match=r"data\.dataset: row [01] of the column 'x' is not a sample"):
            Datasets(bad, bad).load()


def test_pictures_of_hugging_face_are_resized_as_new_images_are(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    picture = Image.fromarray(torch.randint(0, 256, (17, 29, 3), dtype=torch.uint8, generator=generator).numpy())
    picture.save(tmp_path / "picture.png")
    sample, _ = Columns([{"image": picture, "label": 1}], image_size=8)[0]
    assert torch.equal(sample, read_image(tmp_path / "picture.png", (3, 8, 8)))


def test_rows_and_columns_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no column 'image', 'label'; there are"):
        Columns([])
    with pytest.raises(ValueError, match="there is no column 'site'; there are x"):
        Columns([{"x": 1.0}], sample="x", label=None, client="site")
