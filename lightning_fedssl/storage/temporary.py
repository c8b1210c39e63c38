"""Temporary files and folders that are locked while in use, so that those of a killed process are known and removed.

A lock of the operating system ends with the process that holds it, on whatever machine that runs. So a file without a
lock is a leftover, and reused process numbers do not matter.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PARTIAL = ".partial"
"""The end of the name of a file that is being written."""

CLIENTS = "clients-"
"""The begin of the name of a folder for the clients' states of a run."""

_LOCK = ".lock"
_RUNS = ("", "*/", "*/version_*/")
"""Folders of runs below ``default_root_dir``."""


def new_partial(path: Path) -> tuple[int, str]:
    """Make a temporary file beside a path, locked until its descriptor is closed.

    Args:
        path: Where the content will be in the end.

    Returns:
        Its descriptor and its name.
    """
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
        if _lock(descriptor) and os.path.exists(name):  # else another process took it for a leftover
            return descriptor, name
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step: a full disk or an interruption leaves the former file as it was.

    Unlike :func:`lightning_fedssl.storage.checkpoint_file.write_whole` it does not wait for the disk, so that it is for
    files that can be written again: tables, pictures, partitions.

    Args:
        path: The file; its folder is made.
        write: Writes the content to the path that it gets, which has the same ending.

    Raises:
        OSError: If the file cannot be written; it names ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(new)
        new.replace(path)
    except OSError as error:
        if str(error.filename) == str(new):
            error.filename = str(path)
        raise
    finally:
        new.unlink(missing_ok=True)


def new_clients_folder(parent: Path | None) -> tuple[int, Path]:
    """Make a folder for the clients' states of a run, locked until the descriptor is closed.

    Args:
        parent: It is made; the system's folder for temporary files if None.

    Returns:
        The descriptor of its lock, and the folder.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=CLIENTS, dir=parent))
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(descriptor) and (folder / _LOCK).exists():
            return descriptor, folder
        os.close(descriptor)


def remove_leftovers(root: Path, tidy: Callable[[Path], None]) -> None:
    """Remove what killed runs have left below a folder; what a live process uses stays, and so do other files.

    Args:
        root: The trainer's ``default_root_dir``.
        tidy: Removes a folder of clients' states, but no other file in it.
    """
    for path in _found(root, f"checkpoints/.*{PARTIAL}", f"checkpoints/*.clients/.*{PARTIAL}"):
        _if_unused(path, partial(path.unlink, missing_ok=True))
    for lock in _found(root, f"{CLIENTS}*/{_LOCK}"):
        _if_unused(lock, partial(_remove, lock, tidy))


def remove_partials(folder: Path) -> None:
    """Remove the files that killed processes were writing in a folder; a file that is being written stays."""
    for path in folder.glob(f".*{PARTIAL}"):
        _if_unused(path, partial(path.unlink, missing_ok=True))


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends.

    Args:
        folder: It is made.

    Returns:
        The descriptor of its lock; None if another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _found(root: Path, *patterns: str) -> Iterator[Path]:
    return (path for run in _RUNS for pattern in patterns for path in root.glob(f"{run}{pattern}"))


def _if_unused(path: Path, remove: Callable[[], object]) -> None:
    """Call ``remove`` with the lock of a file, unless a live process has it or the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        if _lock(descriptor, default=False):
            remove()
    finally:
        os.close(descriptor)


def _remove(lock: Path, tidy: Callable[[Path], None]) -> None:
    lock.unlink(missing_ok=True)
    tidy(lock.parent)


def _lock(descriptor: int, default: bool = True) -> bool:
    """Lock an open file; whether this was possible, or ``default`` where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return default
    return True
