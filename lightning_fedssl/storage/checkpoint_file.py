"""Checkpoint files: replaced in one step, and read without executing code that they contain.

States of optimizers and clients that are larger than :data:`LARGE` together are files of their own:
``last.states/3-0f5c....pt`` holds that of client 3 for ``last.ckpt``, which names it. Files of
states are written before the checkpoint that names them, and removed after it.
"""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedssl.functional.dictionaries import select
from lightning_fedssl.storage import state_files
from lightning_fedssl.storage.files import write_synced

Checkpoint = dict[str, Any]
"""Tensors and primitives under Lightning's key names; see
:meth:`lightning_fedssl.trainer.FederatedTrainer.save_checkpoint`."""

FORMAT = 4
"""The version of the layout."""

LARGE = 8 << 20
"""Bytes of states from which on they are files of their own."""

CHOSEN = "chosen.ckpt"
"""The checkpoint of a run that ``export``, ``deploy`` and ``predict`` take if none is named."""

SERVER = "server"
"""The name of the server's optimizer among the states."""

_TENSORS = {str: Tensor}
_LAYOUT: dict[Any, Any] = {
    "state_dict": _TENSORS,
    "callbacks": {str: object},
    "model": {
        "algorithm": str,
        "arguments": {str: object},
        "settings": {str: object},
        "network": {"class_path": object},
        "metric_rounds": {str: int},
    },
    "round": int,
    "max_rounds": int | None,  # early checkpoints have none
    "algorithm": str,
    "seed": int,
    "partition": str,
    "metrics": {str: float},
    "total_bytes": float,
    "federation": {
        "parameters": _TENSORS,
        "buffers": _TENSORS,
        "extra": {str: _TENSORS},
        "server_optimizer": _TENSORS,
        "clients": {int: _TENSORS},
        "client_states_left_out": bool,
        "states": {str: str},
        "version": int,
    },
}
"""The type of each entry that is read; of a mapping its entries, or the types of all of its keys
and values."""

_MAPPINGS = {dict, OrderedDict, Counter}
_SEQUENCES = {list, tuple, torch.Size}
_PLAIN = {int, float, bool, str, bytes, complex, type(None), Tensor, nn.Parameter}
"""The types that :func:`load` reads back."""


def save(checkpoint: Checkpoint, path: Path, names: dict[str, str] | None = None) -> None:
    """Write a checkpoint: ``path`` is always either the old or the new one, also if the process is
    killed.

    Args:
        checkpoint: The content.
        path: The file.
        names: The names of the files that hold the present states of clients; those of new files
            are added. None: all in one file.

    Raises:
        OSError: If the disk refuses; the old file is left as it was.
        TypeError: If a value could not be read back, naming its place.
    """
    _check_plain(checkpoint, "checkpoint")
    content = checkpoint if names is None else _with_files(checkpoint, states_of(path), names)
    write_synced(path, lambda file: torch.save(content, file))
    state_files.keep(states_of(path), content["federation"]["states"].values())


def _with_files(checkpoint: Checkpoint, folder: Path, names: dict[str, str]) -> Checkpoint:
    """A checkpoint that names the files of its states; itself if they are small."""
    federation = checkpoint["federation"]
    states = {str(client): state for client, state in federation["clients"].items()}
    states[SERVER] = federation["server_optimizer"]
    if sum(t.nbytes for state in states.values() for t in state.values()) <= LARGE:
        return checkpoint
    names.pop(SERVER, None)
    state_files.write(folder, states, names)
    light = {"clients": {}, "server_optimizer": {}, "states": select(names, states)}
    return {**checkpoint, "federation": federation | light}


def states_of(path: Path) -> Path:
    """The folder of the files of states of a checkpoint."""
    return path.with_suffix(".states")


def read_states(checkpoint: Checkpoint, path: Path) -> list[str]:
    """Read the files of states of a checkpoint into it.

    Args:
        checkpoint: The content of the checkpoint, which is changed.
        path: Its file.

    Returns:
        The parties whose file is not there.

    Raises:
        ValueError: If a file is damaged.
    """
    federation = checkpoint["federation"]
    missing = []
    for party, name in federation["states"].items():
        file = states_of(path) / Path(name).name
        if not file.is_file():
            missing.append(party)
        elif party == SERVER:
            federation["server_optimizer"] = state_files.read(file)
        else:
            federation["clients"][int(party)] = state_files.read(file)
    return missing


def load(path: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU; pickled code in it does not run.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is truncated, damaged or no checkpoint of this package, if an entry
            is missing or has another type, or if a weight is not finite.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"ckpt_path: there is no file {path}; give the path of a .ckpt file, or last, or best"
        )
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load reads changed numbers as they are
            if record := archive.testzip():
                raise zipfile.BadZipFile(f"{record} was changed")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"ckpt_path: {path} holds objects other than tensors and plain values, so it was not "
            "read and nothing in it ran; use a checkpoint written by this package"
        ) from error
    except Exception as error:
        raise ValueError(
            f"ckpt_path: {path} is truncated or damaged ({type(error).__name__}); use another "
            "checkpoint of the run"
        ) from error
    if not isinstance(checkpoint, dict) or "federation" not in checkpoint:
        raise ValueError(
            f"ckpt_path: {path} is not a checkpoint of a federated run; use one written by this "
            "package"
        )
    if checkpoint.get("format") != FORMAT:
        raise ValueError(
            f"ckpt_path: {path} has the format {checkpoint.get('format')}, but this version reads "
            f"format {FORMAT}: use the version of lightning-fedssl that wrote it"
        )
    if place := _misfit(checkpoint, _LAYOUT, "checkpoint"):
        raise ValueError(
            f"ckpt_path: {place} is missing in {path}, or has another type; use another checkpoint "
            "of the run"
        )
    wrong = f"its round is {checkpoint['round']!r}" if checkpoint["round"] < 0 else ""
    weights = {**checkpoint["state_dict"], **checkpoint["federation"]["parameters"]}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            wrong = f"{name} is not finite"
    if wrong:
        raise ValueError(f"ckpt_path: {wrong} in {path}; use a checkpoint of an earlier round")
    return checkpoint


def find(ckpt_path: str | Path, root: Path) -> Path:
    """The file of ``--ckpt_path``: a path; or ``last``, ``best`` or ``chosen``, that file of the
    newest run below ``root``.

    ``last`` is the newest ``last.ckpt``: a run that was killed before its first one cannot be
    resumed. The others are never those of another run than the newest. Of runs in folders
    ``version_N`` the newest is that of the largest number, whatever the dates of its files are;
    dates decide between other folders.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
    """
    if str(ckpt_path) not in {"last", "best", "chosen"}:
        return Path(ckpt_path)
    written: list[Path] = []
    for run in ("", "*/", "*/version_*/"):
        for name in {"last", str(ckpt_path)}:
            written += root.glob(f"{run}checkpoints/{name}.ckpt")
    latest = {path.absolute().parents[2]: path for path in sorted(written, key=_age)}
    newest = max(latest.values(), key=_date, default=None)
    newest_file = newest and newest.with_name(f"{ckpt_path}.ckpt")
    if newest_file is None or not newest_file.is_file():
        raise FileNotFoundError(
            f"ckpt_path: {newest_file or root / f'**/{ckpt_path}.ckpt'} does not exist: give the "
            "folder of the run as --default_root_dir (in Python and to fit and test as "
            "trainer.default_root_dir), or as ckpt_path the path of a .ckpt file "
            "(best.ckpt is written by runs that log what FederatedCheckpoint monitors; last is the "
            "model of the last round)"
        )
    return newest_file


def _age(path: Path) -> tuple[int, int]:
    """The number of the version that a checkpoint is in, -1 for none, and its date."""
    version = path.absolute().parents[1].name.removeprefix("version_")
    return int(version) if version.isdecimal() else -1, _date(path)


def _date(path: Path) -> int:
    return path.stat().st_mtime_ns


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold a value: tensors, numbers, texts, and collections of them."""
    try:
        _check_plain(value, "")
    except TypeError:
        return False
    return True


def _misfit(value: Any, layout: Any, place: str) -> str | None:
    """The place of the first entry that a layout has and a value has not; None if it fits."""
    if not isinstance(layout, dict):
        fits = isinstance(value, layout)
        if layout is Tensor and fits:  # neither sparse, quantised, nor without numbers
            fits = value.layout is torch.strided and not value.is_quantized
        return None if fits else place
    if not isinstance(value, dict):
        return place
    for key, part in layout.items():
        for name in value if isinstance(key, type) else (key,):
            inner = f"{place}[{name!r}]"
            if isinstance(key, type) and not isinstance(name, key):
                return inner
            if wrong := _misfit(value.get(name), part, inner):
                return wrong
    return None


def _check_plain(value: Any, place: str) -> None:
    """Refuse what :func:`load` would refuse.

    A subclass of a plain type is stored by its name, and not read back.
    """
    kind = type(value)
    if kind in _MAPPINGS:
        for key, part in value.items():
            _check_plain(key, f"the key {key!r} of {place}")
            _check_plain(part, f"{place}[{key!r}]")
    elif kind in _SEQUENCES:
        for index, part in enumerate(value):
            _check_plain(part, f"{place}[{index}]")
    elif kind not in _PLAIN or (kind is bytes and not value):  # torch.load refuses empty bytes
        raise TypeError(
            f"{place} is a {kind.__name__}: a checkpoint holds tensors and plain values only"
        )


def remove(path: str | Path) -> None:
    """Remove a checkpoint, with the files of its clients' states."""
    Path(path).unlink(missing_ok=True)
    shutil.rmtree(states_of(Path(path)), ignore_errors=True)
