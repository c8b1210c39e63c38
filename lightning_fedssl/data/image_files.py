"""Image files as uint8 tensors: resized to cover the network's size and cropped to their centre."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lightning_fedssl.storage.files import write_once

RESAMPLING = "BILINEAR"
"""Pillow's name of the filter that resizes images; it averages over more pixels the more an image
shrinks."""

_CONVERT = "convert images to PNG or JPEG (DICOM with pydicom, HEIC with pillow-heif)"
"""The remedy for a file that Pillow cannot open."""

_OF_SYSTEMS = re.compile(r"@eaDir|__MACOSX|[#$@]RECYCLE(\.BIN)?|lost\+found", re.IGNORECASE)
"""Folders that other programs add, such as a NAS."""

_THUMBNAILS = re.compile(rf"{_OF_SYSTEMS.pattern}|thumb(nail)?s|.*[._-]thumb(nail)?", re.IGNORECASE)
"""The same, and small copies of images next to them; a class may have such a name."""


def read_images(
    paths: Sequence[str | Path],
    in_shape: tuple[int, ...],
    cache_dir: str | None = None,
    key: str = "data.root",
) -> Tensor:
    """Reads image files, in order.

    Args:
        paths: The files.
        in_shape: Channels (1 for grey, 3 for colours), height and width.
        cache_dir: A folder; the decoded images are in a memory-mapped ``.npy`` file there, which
            later runs use as it is. None: in memory.
        key: The key of the configuration that a message names.

    Returns:
        uint8 ``(files, channels, height, width)``.

    Raises:
        ValueError: If a file is not a readable image.
    """
    shape = (len(paths), *in_shape)
    if cache_dir is None:
        images = np.empty(shape, dtype=np.uint8)
        _decode(paths, in_shape, key, images)
        return torch.from_numpy(images)
    file = Path(cache_dir, f"{_fingerprint(paths, in_shape)}.npy")

    def write(new: Path) -> None:
        _decode(paths, in_shape, key, np.lib.format.open_memmap(new, "w+", np.uint8, shape))

    write_once(file, write)
    # torch refuses read-only arrays; nothing writes to it
    return torch.from_numpy(np.load(file, mmap_mode="c"))


def _decode(paths: Sequence[str | Path], in_shape: tuple[int, ...], key: str, images: Any) -> None:
    def fill(row: int) -> None:
        images[row] = read_image(paths[row], in_shape, key).numpy()

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders release the interpreter's lock
        done = pool.map(fill, range(len(paths)))
        list(tqdm(done, "reading", len(paths), unit=" images", delay=1, leave=False, disable=None))


def _fingerprint(paths: Sequence[str | Path], in_shape: tuple[int, ...]) -> str:
    """A hash of the files' paths, sizes and times of change, and of the shape of the decoded
    images.
    """
    digest = hashlib.sha256(repr((in_shape, "upright on white")).encode())
    for path in paths:
        size_and_time: tuple[int, ...] = ()
        with suppress(OSError):  # a missing file is refused when it is read
            status = os.stat(path)
            size_and_time = status.st_size, status.st_mtime_ns
        digest.update(repr((os.path.abspath(path), size_and_time)).encode())
    return digest.hexdigest()[:32]


def image_files(
    root: Path, key: str = "data.predict_root", left_out: Counter[str] | None = None
) -> list[Path]:
    """The image files in a folder and in the folders below it, sorted by path; no hidden ones.

    A link to a folder is followed, unless that folder holds ``root`` or is read already.

    Args:
        root: The folder.
        key: The key of the configuration that a message names.
        left_out: Counts the files and folders that are left out, by ending or name.

    Raises:
        FileNotFoundError: If there is no such folder, or no image in it.
    """
    from PIL import Image

    left_out = Counter() if left_out is None else left_out
    suffixes = {
        suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN
    }
    paths = []
    read = {root.resolve(), *root.resolve().parents}
    for folder, below, names in os.walk(root, followlinks=True):
        inside = [Path(folder, name) for name in below]
        below[:] = _entered(inside, read, left_out, _THUMBNAILS)
        for name in filter(_is_visible, sorted(names)):
            path = Path(folder, name)
            ending = path.suffix.lower()
            if ending in suffixes and not _THUMBNAILS.fullmatch(path.stem):
                paths.append(path)
            else:
                left_out["thumbnails" if ending in suffixes else ending or "no ending"] += 1
    if not paths:
        problem = "holds no image file" if root.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{key}: the folder {str(root)!r} {problem}; give a folder of images"
            f"{described(left_out)}"
        )
    return sorted(paths)


LINKS = "links to folders above or read already"
"""What counts of left out files call links that are not followed."""


def _entered(
    folders: Sequence[Path], read: set[Path], left_out: Counter[str], others: re.Pattern[str]
) -> list[str]:
    """The names of the folders to enter, without those of other programs; ``read`` holds those
    above and those entered before.
    """
    entered = []
    for folder in sorted(folders):
        real = folder.resolve()
        if not _is_visible(folder.name):
            continue
        if others.fullmatch(folder.name):
            left_out[f"{folder.name}/"] += 1
        elif real in read:
            left_out[LINKS] += 1
        else:
            entered.append(folder.name)
            read.add(real)
    return entered


def described(left_out: Counter[str]) -> str:
    """What is left out, with the remedy, as the end of a sentence; empty if nothing is."""
    commonest = left_out.most_common(6)
    counts = ", ".join(f"{what} ({count})" for what, count in commonest)
    hint = (
        f"; {_CONVERT}" if any(what.startswith((".", "no ending")) for what, _ in commonest) else ""
    )
    return f"; left out: {counts}{hint}" if counts else ""


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in ("thumbs.db", "desktop.ini")


def visible_folders(root: Path, left_out: Counter[str] | None = None) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones such as ``.ipynb_checkpoints``; none if
    it is not a folder.

    Args:
        root: The folder.
        left_out: Counts what is left out: files, and folders that other programs add.
    """
    left_out = Counter() if left_out is None else left_out
    folders = []
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if entry.is_dir():
            folders.append(entry)
        elif _is_visible(entry.name):
            left_out[f"files *{entry.suffix.lower()} beside class folders"] += 1
    above = {root.resolve(), *root.resolve().parents}
    return [root / name for name in _entered(folders, above, left_out, _OF_SYSTEMS)]


def read_image(path: str | Path, in_shape: tuple[int, ...], key: str = "data.root") -> Tensor:
    """Read an image file: upright by its EXIF data, transparent parts white, resized to cover the
    network's size and cropped to its centre.

    Args:
        path: The file.
        in_shape: Channels (1 for grey, 3 for colours), height and width.
        key: The key of the configuration that a message names.

    Returns:
        uint8 ``(channels, height, width)``.

    Raises:
        ValueError: If the file is not a readable image, or there is no image of this shape.
    """
    from PIL import Image, ImageOps

    if len(in_shape) != 3 or in_shape[0] not in (1, 3):
        raise ValueError(
            f"{key}: image files have 1 or 3 channels, but the network takes {in_shape}; use Python"
        )
    channels, height, width = in_shape
    try:
        if not os.path.isfile(path):  # a pipe would wait for its writer
            raise FileNotFoundError("no such file")
        with Image.open(path) as file:
            file.load()
            converted = _to_rgb(as_seen(file)).convert("RGB" if channels == 3 else "L")
            image = ImageOps.fit(converted, (width, height), Image.Resampling[RESAMPLING])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{key}: {str(path)!r} is not a readable image ({error}); replace or remove the file, "
            f"or {_CONVERT}"
        ) from error
    return torch.from_numpy(np.array(image)).reshape(height, width, channels).permute(2, 0, 1)


def has_pages(path: str | Path) -> bool:
    """Whether an image file has more than one page."""
    from PIL import Image

    with suppress(Exception), Image.open(path) as file:  # refused when it is decoded
        return getattr(file, "n_frames", 1) > 1
    return False


def read_mask(path: str | Path, side: int, image: str | Path) -> Tensor:
    """Read the class numbers of a mask, resized and cropped as :func:`read_image` does its image.

    Args:
        path: The file: grey, with a palette, or black and white.
        side: Height and width.
        image: The file of its image.

    Returns:
        int64 ``(side, side)``, the stored values; of black and white 0 and 1.

    Raises:
        ValueError: If the file is not such an image, or its sides have not the ratio of its
            image's.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            file.load()
            if file.mode not in ("1", "L", "P") or file.format == "JPEG":
                raise ValueError(
                    f"mode {file.mode}: a mask has one 8-bit number for each pixel, in a format "
                    "that keeps it, unlike JPEG"
                )
            ImageOps.exif_transpose(file, in_place=True)
            values = Image.fromarray(np.array(file).astype(np.uint8))
            width, height = upright_size(image)
            # Where mask and image differ in resolution, the sides of one of them are rounded.
            largest = max(width, height, *values.size)
            if abs(width * values.height - height * values.width) > largest:
                raise ValueError(
                    f"{values.width} x {values.height} pixels, and its image {str(image)!r} has "
                    f"{width} x {height}"
                )
            fitted = ImageOps.fit(values, (side, side), Image.Resampling.NEAREST)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"data.dataset: {str(path)!r} is not a readable mask ({error}); write it as a grey PNG"
        ) from error
    return torch.from_numpy(np.array(fitted)).long()


def upright_size(path: str | Path) -> tuple[int, int]:
    """Width and height of an image as it is seen: from the head of its file, where that says that
    it is upright.

    Args:
        path: The file.
    """
    from PIL import ExifTags, Image, ImageOps

    with Image.open(path) as file:
        with suppress(SyntaxError):  # of damaged EXIF data, whose image can be read
            # Pillow has turned the size of some formats (TIFF) already: it is known when all is
            # read.
            if file.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                file.load()
                ImageOps.exif_transpose(file, in_place=True)
        return file.size


def as_seen(image: Any) -> Any:
    """A Pillow image as it is seen: upright by its EXIF data, and on white where it is transparent.

    Args:
        image: The image; it may be changed.
    """
    from PIL import Image, ImageOps

    with suppress(SyntaxError):  # of damaged EXIF data, whose image can be read
        ImageOps.exif_transpose(image, in_place=True)
    marked = image.mode in ("L", "RGB", "P") and "transparency" in image.info
    if image.mode not in ("RGBA", "LA", "PA") and not marked:
        return image
    grey = image.mode in ("L", "LA")
    white = Image.new("RGBA", image.size, "white")
    on_white = Image.alpha_composite(white, image.convert("RGBA"))
    return on_white.convert("L" if grey else "RGB")


def _to_rgb(image: Any) -> Any:
    """A Pillow image as 8-bit RGB.

    16-bit grey values are scaled by their range, which Pillow itself would clip.
    """
    from PIL import Image

    mode = image.mode
    # Older Pillow opens a 16-bit PNG as I.
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):
        values = np.asarray(image, dtype=np.int64)
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    elif mode in ("I", "F"):
        raise ValueError(
            f"mode {mode}: 32-bit values have no fixed range; convert the file to 8 or 16 bits per "
            "value"
        )
    return image.convert("RGB")
