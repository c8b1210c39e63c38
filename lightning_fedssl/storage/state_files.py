"""States of optimizers and clients in files of their own, so that those that stay are not written
again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.storage.files import sync_folder, write_bytes

State = dict[str, Tensor]

_REMEDY = "use another checkpoint"


def write(folder: Path, states: Mapping[str, State], names: dict[str, str]) -> None:
    """Write the states whose file is not in a folder.

    A file is named by its content, so no file that a checkpoint names is ever changed.

    Args:
        folder: The folder; it is made.
        states: The states, by the party that they belong to.
        names: The names of the files that hold the present states, by party; those of new files
            are added.

    Raises:
        OSError: If the disk refuses.
    """
    for party, state in states.items():
        if party in names and (folder / names[party]).is_file():
            continue
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        names[party] = f"{party}-{_digest(content)}.pt"
        file = folder / names[party]
        if not file.is_file():
            write_bytes(file, content, one_of_many=True)
    sync_folder(folder)


def read(path: Path) -> State:
    """A state.

    Raises:
        ValueError: If the file is damaged, or holds anything but tensors by name.
    """
    content = path.read_bytes()
    if not path.stem.endswith(_digest(content)):
        raise ValueError(f"ckpt_path: {path} was changed or damaged; {_REMEDY}")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return map_values(Tensor.detach, state)
    except Exception as error:
        raise ValueError(f"ckpt_path: {path} is not a file of states; {_REMEDY}") from error


def keep(folder: Path, names: Iterable[str]) -> None:
    """Remove the files of a folder that have other names, if there is such a folder."""
    for path in set(folder.glob("*")) - {folder / name for name in names}:
        if path.is_file():  # a NAS adds folders
            path.unlink()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
