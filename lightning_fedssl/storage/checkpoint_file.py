"""Checkpoint files: written atomically, and read without executing code that they contain."""

from __future__ import annotations

import os
import pickle
import shlex
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from lightning_fedssl.functional.device_copies import tree_on_cpu
from lightning_fedssl.storage.temporary import new_partial

Checkpoint = dict[str, Any]
"""Tensors and primitives under Lightning's key names; see
:meth:`lightning_fedssl.trainer.FederatedTrainer.save_checkpoint`."""

FORMAT = 1
"""The version of the layout. Older files without a version have the same layout."""

_KEYS = {"state_dict", "callbacks", "round", "federation", "algorithm", "seed", "partition", "metrics", "optimizer"}

_MAPPINGS = {dict, OrderedDict, Counter}
_SEQUENCES = {list, tuple, torch.Size}
_PLAIN = {int, float, bool, str, bytes, complex, type(None), Tensor, nn.Parameter}
"""The types that :func:`load` reads back."""


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint atomically: ``path`` is always either the old or the new checkpoint.

    A temporary file in the same folder is written, synced to disk and renamed; then the folder is synced.

    Raises:
        OSError: If the disk refuses; the old file is left as it was.
        TypeError: If a value could not be read back, naming its place.
    """
    on_cpu = tree_on_cpu(checkpoint)
    _check_plain(on_cpu, "checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: torch.save(on_cpu, file))
    sync_folder(path.parent)


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: it appears, or replaces an older file, when all its bytes are on the disk.

    Its name is on the disk after :func:`sync_folder`. What a kill leaves is removed by
    :func:`lightning_fedssl.storage.temporary.remove_leftovers`.

    Args:
        path: The file.
        write: Writes the content.

    Raises:
        OSError: If the disk refuses; the old file is left as it was.
    """
    descriptor, temporary = new_partial(path)
    try:
        with os.fdopen(descriptor, "wb") as file:  # which holds the lock until the name has changed
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        refusal = _refusal_of_the_disk(error)
        if refusal is None:
            raise
        raise OSError(refusal.errno, refusal.strerror, str(path)) from error


def _refusal_of_the_disk(error: BaseException | None) -> OSError | None:
    """The disk's error among the causes of an error: ``torch.save`` hides it behind an error of its own."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    return error


def load(path: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU; pickled code in it does not run.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is truncated, damaged or no checkpoint of this package.
    """
    if path.is_dir():
        raise FileNotFoundError(f"ckpt_path: {path} is a folder; {_checkpoints_in(path)}")
    if not path.is_file():
        raise FileNotFoundError(f"ckpt_path: there is no file {path}; give the path of a .ckpt file, or last, or best")
    try:
        _check_sums(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"ckpt_path: {path} holds objects other than tensors and plain values, so it was not read and nothing in "
            "it ran; use a checkpoint written by this package"
        ) from error
    except Exception as error:
        raise ValueError(
            f"ckpt_path: {path} is truncated or damaged ({type(error).__name__}); use another checkpoint of the run"
        ) from error
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _KEYS:
        raise ValueError(f"ckpt_path: {path} is no checkpoint of a federated run; use one written by this package")
    found = checkpoint.get("format", FORMAT)
    if found != FORMAT:
        raise ValueError(
            f"ckpt_path: {path} has the format {found}, but this version reads format {FORMAT}: use the version of "
            "lightning-fedssl that wrote it"
        )
    return checkpoint


def find(ckpt_path: str | Path, root: Path) -> Path:
    """The file of ``--ckpt_path``.

    A run that was killed before its first ``last.ckpt`` cannot be resumed, so ``last`` skips it. ``best`` is never that
    of another run. But a run that has resumed another one, and had no better round since, shares the best checkpoint of
    that run.

    Args:
        ckpt_path: A path; or ``last`` or ``best``: that file of the newest run below ``root``.
        root: The trainer's ``default_root_dir``.

    Raises:
        FileNotFoundError: If no run below ``root`` has such a checkpoint, or the newest one has no ``best``.
        ValueError: If the newest run has no ``best``, and its ``last`` cannot be read.
    """
    if str(ckpt_path) not in {"last", "best"}:
        return Path(ckpt_path)
    folders = _folders_of_runs(root)
    found = [path for folder in folders if (path := folder / f"{ckpt_path}.ckpt").is_file()]
    if not found:
        raise FileNotFoundError(
            f"ckpt_path: no run in {root} has a {ckpt_path} checkpoint; {_runs_below(root, str(ckpt_path))}"
        )
    if str(ckpt_path) == "last" or found[0].parent == folders[0]:
        return found[0]
    return _best_of_resumed_run(folders[0], found)


def _folders_of_runs(root: Path) -> list[Path]:
    """The folders of checkpoints below a folder; first that of the run that has written one most recently."""
    files = [path for run in ("", "*/", "*/version_*/") for path in root.glob(f"{run}checkpoints/*.ckpt")]
    written = [path for path in files if path.name in ("last.ckpt", "best.ckpt")]
    written.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return list(dict.fromkeys(path.parent for path in written))


def _best_of_resumed_run(newest: Path, found: list[Path]) -> Path:
    """The best checkpoint of the run that the newest run has resumed: its last checkpoint knows that round."""
    last = load(newest / "last.ckpt")
    for path in found if _best_rounds(last) else []:
        with suppress(ValueError):  # a damaged file of some other run is not what was asked for
            best = load(path)
            same = all(best.get(key) == last.get(key) for key in ("algorithm", "seed", "partition", "settings"))
            if same and _best_rounds(best) == _best_rounds(last):
                return path
    raise FileNotFoundError(
        f"ckpt_path: the newest run, {newest.parent}, has no best checkpoint, which only validation gives it; "
        "give --ckpt_path last, or the path of a .ckpt file"
    )


def _best_rounds(checkpoint: Checkpoint) -> dict[str, Any]:
    """The states of the callbacks that write ``best.ckpt``, as far as they know a best round."""
    states = checkpoint["callbacks"].items()
    return {key: state for key, state in states if isinstance(state, dict) and state.get("best_round")}


def _runs_below(root: Path, name: str) -> str:
    """The remedy if ``root`` itself has no run: folders further below that have some."""
    found = [path for place in ("", "runs/") for path in root.glob(f"{place}*/*/version_*/checkpoints/{name}.ckpt")]
    folders = sorted({str(path.parents[3]) for path in found})
    if not folders:
        return "set trainer.default_root_dir to the folder of the run, or give the path of a .ckpt file"
    return (
        f"there are runs in {_some(folders)}: add the --config FILE of such a run, or --trainer.default_root_dir "
        f"{shlex.quote(folders[0])}"
    )


def _checkpoints_in(folder: Path) -> str:
    """The remedy if a path is a folder: its checkpoints, also those below ``checkpoints``."""
    found = sorted(str(path) for place in ("", "checkpoints/") for path in folder.glob(f"{place}*.ckpt"))
    return (
        f"give one of its checkpoints: {_some(found)}" if found else "give the path of a .ckpt file, or last, or best"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _check_plain(value: Any, place: str) -> None:
    """Refuse what :func:`load` would refuse; a subclass of a plain type is stored by its name, and not read back."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, part in value.items():
            _check_plain(key, f"the key {key!r} of {place}")
            _check_plain(part, f"{place}[{key!r}]")
    elif kind in _SEQUENCES:
        for index, part in enumerate(value):
            _check_plain(part, f"{place}[{index}]")
    elif kind not in _PLAIN or (kind is bytes and not value):  # torch.load refuses empty bytes
        raise TypeError(f"{place} is a {kind.__name__}: a checkpoint holds tensors and plain values only")


def _check_sums(path: Path) -> None:
    """Compare every record with its CRC-32, because ``torch.load`` would silently accept changed numbers."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if (record := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"{record} was changed")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
