"""Decoded images in memory, or in a file that is made once and memory-mapped.

The file of a cache is complete as soon as it has its final name. While it is made it is ``<fingerprint>.partial.npy``,
and ``<fingerprint>.rows`` counts the images that are certainly on the disk, so a killed run resumes there. A lock lets
one process write; the others wait and then read. ``<fingerprint>.sha256`` is the hash of a complete file's images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl.data.mapped_images import HASH, MappedImages

_CHUNK = 512
"""The number of images after which the progress of the file is saved."""

_PARTIAL, _ROWS = ".partial.npy", ".rows"

Read = Callable[[int], Tensor]
"""A function from a row to its image, uint8."""


def decode_into_memory(read: Read, shape: tuple[int, ...]) -> Tensor:
    """Decodes all images into one tensor.

    Args:
        read: Decodes an image.
        shape: ``(N, channels, height, width)``.
    """
    images = np.empty(shape, dtype=np.uint8)
    for _ in _decode(read, images, 0):
        pass
    return torch.from_numpy(images)


def open_or_decode(folder: Path, fingerprint: str, read: Read, shape: tuple[int, ...]) -> Tensor:
    """Opens the file of decoded images; makes it first if there is none.

    Args:
        folder: ``data.cache_dir``.
        fingerprint: Determines the images; it is the file's name.
        read: Decodes an image.
        shape: ``(N, channels, height, width)``.

    Raises:
        OSError: If the folder cannot be written, or is too small; the message names the key.
    """
    final = folder / f"{fingerprint[:32]}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not final.exists():
            with FileLock(final.with_suffix(".lock")):
                if not final.exists():  # another process may have made it
                    _remove_leftovers(folder, final)
                    _make(final, read, shape)
    except OSError as error:
        size = int(np.prod(shape)) / 1e9
        raise OSError(
            f"data.cache_dir: {size:.2g} GB of decoded images cannot be written to {str(folder)!r} ({error}); free "
            "space, or choose another folder"
        ) from error
    mapped = MappedImages(torch.from_numpy(_open(final, shape)), file=final)
    return cast(Tensor, mapped)  # a memory map supports indexing, which is all that samples need


def _open(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        images = np.load(path, mmap_mode="c")  # torch refuses arrays that are read-only; nothing writes to them
        if images.shape == shape and images.dtype == np.uint8:
            return images  # type: ignore[no-any-return]
        problem = f"it holds {images.shape} {images.dtype}"
    except (OSError, ValueError, EOFError) as error:
        problem = str(error)
    raise ValueError(f"data.cache_dir: {str(path)!r} is damaged ({problem}); delete the file, and it is made again")


def _make(final: Path, read: Read, shape: tuple[int, ...]) -> None:
    partial, rows = final.with_suffix(_PARTIAL), final.with_suffix(_ROWS)
    done = _resumable_rows(partial, rows, shape)
    if not done:
        rows.unlink(missing_ok=True)  # it may count the images of a file that was removed
        _reserve(partial, shape)
    images = np.lib.format.open_memmap(partial, mode="r+")
    at = f", {done:,} of them are there already" if done else ""
    from lightning.pytorch.utilities import rank_zero_info  # imported late: it takes seconds

    rank_zero_info(f"data.cache_dir: decoding {len(images):,} images into {str(final)!r}{at}")
    for filled in _decode(read, images, done):
        images.flush()
        _note(rows, filled)
    del images
    final.with_suffix(HASH).unlink(missing_ok=True)  # that of a file that was removed
    partial.replace(final)
    rows.unlink(missing_ok=True)


def _reserve(path: Path, shape: tuple[int, ...]) -> None:
    """An empty file of the full size; without reserved space, a full disk would end the process by a signal."""
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _resumable_rows(partial: Path, rows: Path, shape: tuple[int, ...]) -> int:
    """How many images of an interrupted file can be used; 0 to begin anew."""
    try:
        usable = np.load(partial, mmap_mode="r").shape == shape
        return min(int(rows.read_text()), shape[0]) if usable else 0
    except (OSError, ValueError, EOFError):
        return 0


def _note(rows: Path, done: int) -> None:
    temporary = rows.with_suffix(".rows.tmp")
    temporary.write_text(str(done))
    temporary.replace(rows)


def _decode(read: Read, images: NDArray[Any], first: int) -> Iterator[int]:
    """Fills the array from a row on and yields, from time to time, how many rows are filled."""

    def fill(row: int) -> None:
        images[row] = read(row).numpy()

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders release the interpreter's lock
        for start in range(first, len(images), _CHUNK):
            stop = min(start + _CHUNK, len(images))
            list(pool.map(fill, range(start, stop)))
            yield stop


def _remove_leftovers(folder: Path, final: Path) -> None:
    """Removes unfinished files of other images that no process is writing: what killed runs left behind."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        other = partial.with_name(partial.name.removesuffix(_PARTIAL) + ".npy")
        if other == final:
            continue
        try:
            with FileLock(other.with_suffix(".lock"), timeout=0):
                partial.unlink(missing_ok=True)
                other.with_suffix(_ROWS).unlink(missing_ok=True)
        except Timeout:
            pass
