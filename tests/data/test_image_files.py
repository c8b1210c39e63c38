"""Image files as tensors, in memory and in a memory-mapped file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fedssl.data import Columns, image_files
from lightning_fedssl.data.image_files import read_image, read_images


def write_images(folder: Path, count: int = 5) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(path)
    return paths


def test_an_image_covers_the_square_and_is_cropped_to_its_centre(tmp_path: Path) -> None:
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, 4:12, 1] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    image = read_image(tmp_path / "wide.png", (3, 8, 8))
    assert image[1].unique().tolist() == [200]
    assert not image[[0, 2]].any()
    assert read_image(tmp_path / "wide.png", (1, 4, 4)).shape == (1, 4, 4)


def test_an_image_stands_as_its_exif_data_say(tmp_path: Path) -> None:
    exif, pixels = Image.Exif(), np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 255
    exif[0x0112] = 6  # a quarter turn to the right
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png", (1, 8, 8))[0, 0].tolist() == [0] * 4 + [255] * 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(tmp_path: Path, mode: str) -> None:
    """A black cross whose transparent rest is black, too."""
    shape = np.zeros((8, 8, 4), np.uint8)
    shape[3:5, :, 3] = 255
    picture = Image.fromarray(shape).convert("LA" if mode == "LA" else "RGBA")
    options: dict[str, Any] = {}
    if mode == "P":
        picture, options = Image.fromarray(shape[..., 3] // 255).convert("P"), {"transparency": 0}
        picture.putpalette([0] * 6)
    picture.save(tmp_path / "icon.png", **options)
    wanted = torch.full((8, 8), 255).byte()
    wanted[3:5] = 0
    of_columns, _ = Columns([{"image": Image.open(tmp_path / "icon.png"), "label": 0}])[0]
    for found in (
        read_image(tmp_path / "icon.png", (3, 8, 8)),
        read_image(tmp_path / "icon.png", (1, 8, 8)),
        of_columns,
    ):
        assert torch.equal(found, wanted.expand_as(found))


def test_a_cache_gives_what_memory_gives_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, cache = write_images(tmp_path), tmp_path / "cache"
    expected = read_images(paths, (3, 8, 8))
    assert torch.equal(read_images(paths, (3, 8, 8), str(cache)), expected)
    assert not list(cache.glob("*.partial*"))
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "read_image", lambda *_: pytest.fail("an image was decoded again"))
        assert torch.equal(read_images(paths, (3, 8, 8), str(cache)), expected)
    Image.new("RGB", (9, 9), (1, 2, 3)).save(paths[0])
    os.utime(paths[0], (1, 1))
    assert read_images(paths, (3, 8, 8), str(cache))[0, :, 0, 0].tolist() == [1, 2, 3]
    assert read_images(paths, (3, 4, 4), str(cache)).shape == (5, 3, 4, 4)


def test_an_interrupted_cache_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, cache = write_images(tmp_path), tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "read_image", lambda p, *how: read_image(p, *how) if p != paths[3] else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read_images(paths, (3, 8, 8), str(cache))
    assert torch.equal(read_images(paths, (3, 8, 8), str(cache)), read_images(paths, (3, 8, 8)))


def test_hidden_files_are_left_out_and_linked_folders_are_read(tmp_path: Path) -> None:
    for folder in ("photos", "photos/.hidden", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        write_images(tmp_path / folder, 1)
    (tmp_path / "photos" / "._0.png").write_bytes(b"no image")
    (tmp_path / "photos" / "notes.txt").write_bytes(b"no image")
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    found = [path.relative_to(tmp_path).as_posix() for path in image_files.image_files(tmp_path / "photos")]
    assert found == ["photos/0.png", "photos/link/0.png"]
    with pytest.raises(FileNotFoundError, match="does not exist; give a folder of images"):
        image_files.image_files(tmp_path / "nowhere")


def test_what_is_no_readable_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"no image")
    (tmp_path / "2.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "3.png")
    for name in ("1.png", "2.png", "3.png"):
        with pytest.raises(ValueError, match=rf"data\.root: .*{name}' is not a readable image"):
            read_image(tmp_path / name, (3, 8, 8))


def test_a_network_that_takes_no_images_is_named(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"image files have 1 or 3 channels, but the network takes \(2, 8, 8\)"):
        read_image(tmp_path / "a.png", (2, 8, 8))


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
