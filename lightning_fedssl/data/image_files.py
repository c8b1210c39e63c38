"""Image files as uint8 tensors: resized to cover the network's size and cropped to their centre."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data import image_cache

RESAMPLING = "BILINEAR"
"""Pillow's name of the filter that resizes images; it averages over more pixels the more an image shrinks."""


def read_images(
    paths: Sequence[str | Path], in_shape: tuple[int, ...], cache_dir: str | None = None, key: str = "data.root"
) -> Tensor:
    """Reads image files, in order.

    Args:
        paths: The files.
        in_shape: Channels (1 for grey, 3 for colours), height and width.
        cache_dir: A folder; the decoded images are in a file there, which later runs use as it is. None: in memory.
        key: The key of the configuration that a message names.

    Returns:
        uint8 ``(files, channels, height, width)``; with a cache
        :class:`~lightning_fedssl.data.mapped_images.MappedImages`.

    Raises:
        ValueError: If a file is not a readable image.
    """

    def read(row: int) -> Tensor:
        return read_image(paths[row], in_shape, key)

    shape = (len(paths), *in_shape)
    if cache_dir is None:
        return image_cache.decode_into_memory(read, shape)
    return image_cache.open_or_decode(Path(cache_dir), _fingerprint(paths, in_shape, key), read, shape)


def _fingerprint(paths: Sequence[str | Path], in_shape: tuple[int, ...], key: str) -> str:
    """A hash of the files' paths, sizes and times of change, and of all that the decoded images depend on."""
    import PIL

    digest = hashlib.sha256(repr((PIL.__version__, in_shape)).encode())
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise ValueError(f"{key}: {str(path)!r} cannot be read ({error.strerror}); replace or remove it") from error
        digest.update(f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def image_files(root: Path, key: str = "data.predict_root") -> list[Path]:
    """The image files in a folder and in the folders below it, linked ones included, sorted by path; no hidden ones.

    Args:
        root: The folder.
        key: The key of the configuration that a message names.

    Raises:
        FileNotFoundError: If there is no such folder, or no image in it.
    """
    found = sorted(_files_below(root))
    if not found:
        if root.is_file():
            raise FileNotFoundError(f"{key}: {str(root)!r} is a file; give a folder of images")
        problem = "holds no image file" if root.is_dir() else "does not exist"
        raise FileNotFoundError(f"{key}: the folder {str(root)!r} {problem}; give a folder of images")
    return found


def _files_below(root: Path) -> Iterator[Path]:
    """The visible files below a folder whose names end as Pillow's formats do."""
    from PIL import Image

    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = [name for name in below if _is_visible(name) and not _leads_back(Path(folder, name))]
        files = (Path(folder, name) for name in names if _is_visible(name))
        yield from (path for path in files if path.suffix.lower() in known)


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _leads_back(folder: Path) -> bool:
    """Whether a folder is a link to one that it is in, whose files would be found again and again."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def visible_folders(root: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones such as ``.ipynb_checkpoints``; none if it is no folder.

    Args:
        root: The folder.
    """
    entries = root.iterdir() if root.is_dir() else ()
    return sorted(entry for entry in entries if entry.is_dir() and _is_visible(entry.name))


def read_image(path: str | Path, in_shape: tuple[int, ...], key: str = "data.root") -> Tensor:
    """Read an image file: resized to cover the network's size and cropped to its centre.

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

    if not os.path.lexists(path):
        raise ValueError(
            f"{key}: there is no file {str(path)!r}; correct its name, or the folder that file names are relative to"
        )
    if not os.path.isfile(path):  # a pipe would wait for its writer
        raise ValueError(f"{key}: {str(path)!r} is no regular file; replace or remove it")
    if len(in_shape) != 3 or in_shape[0] not in (1, 3):
        raise ValueError(f"{key}: image files have 1 or 3 channels, but the network takes {in_shape}; use Python")
    channels, height, width = in_shape
    try:
        with Image.open(path) as file:
            converted = _to_rgb(file) if channels == 3 else _to_rgb(file).convert("L")
            image = ImageOps.fit(converted, (width, height), Image.Resampling[RESAMPLING])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{key}: {str(path)!r} is not a readable image ({error}); replace or remove the file"
        ) from error
    return torch.from_numpy(np.array(image)).reshape(height, width, channels).permute(2, 0, 1)


def _to_rgb(image: Any) -> Any:
    """A Pillow image as 8-bit RGB; 16-bit grey values are scaled by their range, which Pillow itself would clip."""
    from PIL import Image

    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format == "PNG"):  # older Pillow opens a 16-bit PNG as I
        values = np.asarray(image, dtype=np.int64)
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    elif mode in ("I", "F"):
        raise ValueError(f"mode {mode}: 32-bit values have no fixed range; convert the file to 8 or 16 bits per value")
    return image.convert("RGB")
