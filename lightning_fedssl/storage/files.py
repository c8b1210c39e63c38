"""Files that are replaced in one step, and folders that one process uses at a time."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from lightning_fedssl.functional.dictionaries import map_values


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step: a full disk or an interruption leaves the former file as it was.

    Unlike :func:`write_synced` it does not wait for the disk, so that it is for files that can be
    written again: tables, pictures, partitions.

    Args:
        path: The file; its folder is made.
        write: Writes the content to the path that it gets, which has the same ending.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_once(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file as :func:`replace_file` does, unless it exists.

    One process writes, the others wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            replace_file(path, write)


class _Disk(FileIO):
    """A file that knows why the disk has refused: torch.save says something else."""

    refusal: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes."""
        try:
            return super().write(content)
        except OSError as error:
            self.refusal = error
            raise


def write_synced(
    path: Path, write: Callable[[IO[bytes]], object], one_of_many: bool = False
) -> None:
    """Write a file that survives a kill and a power cut: ``path`` is the old file until all of the
    new one is on disk.

    A killed process leaves ``.NAME.partial``, which the next write replaces. One process at a time
    may write a path.

    Args:
        path: The file; its folder is made.
        write: Writes the content.
        one_of_many: Whether the caller calls :func:`sync_folder` after the last of many files.

    Raises:
        OSError: If the disk refuses; the old file is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.partial")
    disk = _Disk(new, "wb")
    try:
        with BufferedWriter(disk, 1 << 20) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except Exception as error:
        if disk.refusal is None:
            raise
        raise OSError(disk.refusal.errno, disk.refusal.strerror, str(path)) from error
    finally:
        new.unlink(missing_ok=True)
    if not one_of_many:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names of a folder's files are on disk."""
    try:
        folder = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_bytes(path: Path, content: bytes, one_of_many: bool = False) -> None:
    """Write bytes as :func:`write_synced` does."""
    write_synced(path, lambda file: file.write(content), one_of_many)


def as_json(value: Any, indent: int | None = None) -> str:
    """Values as JSON; numbers that are NaN or infinite, which JSON does not have, become ``null``.

    Args:
        value: Nested dicts and lists of plain values.
        indent: As in :func:`json.dumps`.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return map_values(_finite, value)
    if isinstance(value, (list, tuple)):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV, in one step as :func:`replace_file` does; the first is the head."""

    def write(new: Path) -> None:
        with new.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    replace_file(path, write)


def versions(root: Path) -> list[Path]:
    """The folders of runs below a ``default_root_dir``, oldest first; a resumed run has several."""
    folders = (root / "lightning_logs").glob("version_*")
    numbered = [path for path in folders if path.name[8:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name[8:]))


def lock_folder(folder: Path) -> FileLock | None:
    """Lock a folder until the lock is released or the process ends; None if another process has it.

    Args:
        folder: It is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock
