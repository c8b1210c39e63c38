"""The persistent state of clients, in memory or in files; saving writes only the files that have changed.

A file holds the tensors of one kind of one client, as safetensors, and is never written again: its name
``CLIENT.KIND.DIGEST.safetensors`` contains a digest of its content. So a checkpoint is a list of names, an existing
file need not be written again for the next checkpoint, and a file that is not on the list was left by a killed process.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from lightning_fedssl.functional.averaging import State, sizes_of
from lightning_fedssl.functional.device_copies import copy_to_cpu
from lightning_fedssl.storage.checkpoint_file import sync_folder, write_whole
from lightning_fedssl.storage.temporary import new_clients_folder, remove_leftovers

_NAME = re.compile(r"(?P<client>\d+)\.(?P<kind>[^./]+)\.(?P<digest>[0-9a-f]{16})\.safetensors")


class ClientStore:
    """The clients' persistent state: named tensors per client and kind, on the CPU. Most methods have none.

    The state of a client must not change if its update is rejected. So everything that is written while a client
    starts, trains and ends (inside :meth:`stage`) is staged until :meth:`commit`, or dropped by :meth:`discard`. A
    write outside of :meth:`stage`, such as in ``accumulate``, takes effect at once.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, _Kept]] = {}
        self._folder: Path | None = None
        self._staged: dict[int, dict[tuple[str, int], State]] = {}
        self._staging: int | None = None
        self._changed: set[tuple[str, int]] = set()

    def keep_on_disk(self, parent: str | Path | None) -> None:
        """Store tensors in files of a new folder from now on; the folder is removed together with this store.

        Args:
            parent: The parent of the new folder; the system's folder for temporary files if None.
        """
        if self._folder is not None:
            return
        lock, self._folder = new_clients_folder(None if parent is None else Path(parent))
        # It runs when a forked rank ends, too, and does not remove the folder of the parent process in a forked rank.
        Finalize(self, _remove_folder, (self._folder, lock), exitpriority=0)
        for kind, client, kept in list(self._entries()):
            self._set(client, kind, kept.read())

    def get(self, client: int, kind: str) -> State:
        """The stored tensors of one kind of a client; empty if there are none. Do not change them in place.

        Args:
            client: The client's number.
            kind: ``"optimizer"`` for optimizer states, any other name for a method's state.
        """
        staged = {} if self._staging is None else self._staged.get(self._staging, {})
        if (kind, client) in staged:
            return staged[kind, client]
        kept = self._kept.get(kind, {}).get(client)
        return kept.read() if kept else {}

    def put(self, client: int, kind: str, state: State) -> None:
        """Replace the tensors of a kind by copies of these; an empty state deletes them.

        Args:
            client: The client's number.
            kind: See :meth:`get`; without a dot.
            state: The tensors.

        Raises:
            ValueError: The state is no dictionary of tensors.
        """
        if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
            raise ValueError(f"clients.put(..., {kind!r}, state): state is no dict of tensors by name: {state!r}")
        copied = dict(zip(state, copy_to_cpu(list(state.values())), strict=True))
        if self._staging is None:
            self._set(client, kind, copied)
        else:
            self._staged.setdefault(self._staging, {})[kind, client] = copied

    # Acceptance of updates.

    @property
    def staging(self) -> int | None:
        """The client of the current :meth:`stage` block; None outside."""
        return self._staging

    @contextmanager
    def stage(self, client: int) -> Iterator[None]:
        """Stage what is written inside the block, under any number, until the client's update is accepted.

        Inside the block :meth:`get` returns what this client has written; all other methods see the committed state.

        Args:
            client: The client that trains.
        """
        before, self._staging = self._staging, client
        try:
            yield
        finally:
            self._staging = before

    def commit(self, client: int) -> None:
        """Store the staged state of a client: its update is accepted, or it skipped the round."""
        for (kind, owner), state in self._staged.pop(client, {}).items():
            self._set(owner, kind, state)

    def discard(self, client: int) -> None:
        """Drop the staged state of a client: its update is rejected."""
        self._staged.pop(client, None)

    # Exchange between ranks.

    def watch_changes(self) -> None:
        """Begin a phase of client training, with nothing staged and no :meth:`changes`."""
        self._staged.clear()
        self._changed.clear()

    def changes(self) -> dict[tuple[str, int], State]:
        """The states stored since :meth:`watch_changes`, by kind and client; an empty state was deleted."""
        return {(kind, client): self.get(client, kind) for kind, client in sorted(self._changed)}

    def apply(self, changes: Mapping[tuple[str, int], State]) -> None:
        """Store the :meth:`changes` of another rank's store; the tensors are not copied."""
        for (kind, client), state in changes.items():
            self._set(client, kind, state)

    def of(self, client: int) -> State:
        """All stored tensors of a client, named ``kind.name``; empty if there are none."""
        return {
            f"{kind}.{name}": t
            for kind, of_kind in self._kept.items()
            if client in of_kind
            for name, t in of_kind[client].read().items()
        }

    def replace(self, client: int, kept: State) -> None:
        """Replace the state of a client, of every kind; the tensors are not copied.

        Args:
            client: The client's number.
            kept: The tensors as :meth:`of` returns them; empty to delete the client's state.
        """
        parts: dict[str, State] = {kind: {} for kind in self._kept}
        for name, t in kept.items():
            kind, _, own = name.partition(".")
            parts.setdefault(kind, {})[own] = t
        for kind, state in parts.items():
            self._set(client, kind, state)

    def having(self, kind: str) -> list[int]:
        """The clients with a state of this kind, in ascending order."""
        return sorted(self._kept.get(kind, {}))

    def __len__(self) -> int:
        """The number of clients with a state."""
        return len(self._clients())

    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(kept.size for _, _, kept in self._entries())

    def clone(self) -> ClientStore:
        """A copy of the store in memory; changes of the copy do not affect this store."""
        clone = ClientStore()
        clone._kept = {kind: dict(of_kind) for kind, of_kind in self._kept.items()}
        return clone

    def state_dict(self) -> dict[int, State]:
        """Every client's tensors as :meth:`of` returns them."""
        return {client: self.of(client) for client in self._clients()}

    def load_state_dict(self, states: Mapping[int, State]) -> None:
        """Replace all states by those that :meth:`state_dict` returned."""
        for client in self._clients():
            self.replace(client, {})
        for client, state in states.items():
            self.replace(client, state)

    # Files of a checkpoint.

    def save(self, folder: Path) -> list[str]:
        """Write a file for every stored state into a folder; files that exist already are not written again.

        Args:
            folder: The folder; it is made. Other files in it are not removed, see :func:`tidy`.

        Returns:
            The names of the files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        present = set(os.listdir(folder))
        names = [kept.save(folder, client, kind, present) for kind, client, kept in self._entries()]
        sync_folder(folder)
        return names

    def load(self, folder: Path, names: Sequence[str]) -> None:
        """Replace all states by those of the files that :meth:`save` returned.

        Raises:
            ValueError: If a file is missing or was changed, naming it.
        """
        self.load_state_dict({})
        for name in names:
            client, kind, tensors = _read_checked(folder, name)
            kept = _Kept(tensors, folder / name)
            if self._folder is not None:
                link_or_copy(folder / name, self._folder / name)
                kept.tensors, kept.file = None, self._folder / name
            self._kept.setdefault(kind, {})[client] = kept

    def __getstate__(self) -> dict[str, Any]:
        """Make copies, also those for other processes, stores in memory."""
        return {"states": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ClientStore.__init__(self)
        self.load_state_dict(state["states"])

    def _clients(self) -> set[int]:
        return {client for of_kind in self._kept.values() for client in of_kind}

    def _entries(self) -> Iterator[tuple[str, int, _Kept]]:
        return ((kind, client, kept) for kind, of_kind in self._kept.items() for client, kept in of_kind.items())

    def _set(self, client: int, kind: str, tensors: State) -> None:
        self._changed.add((kind, client))
        of_kind = self._kept.setdefault(kind, {})
        old = of_kind.pop(client, None)
        new = None
        if tensors:
            new = of_kind[client] = _Kept(tensors)
            if self._folder is not None:
                new.write(self._folder, client, kind)
        if self._folder is not None and old and old.file and not (new and new.file == old.file):
            old.file.unlink(missing_ok=True)


@dataclass
class _Kept:
    """Tensors of one kind of one client: in memory, in a file, or both."""

    tensors: State | None
    file: Path | None = None
    size: int = 0

    def __post_init__(self) -> None:
        if self.tensors is not None:
            self.size = sum(sizes_of(self.tensors).values())

    def read(self) -> State:
        """The tensors; those of a file are mapped into memory, and changing them does not change the file."""
        if self.tensors is not None:
            return self.tensors
        assert self.file is not None
        return safetensors.torch.load_file(self.file)

    def write(self, folder: Path, client: int, kind: str) -> None:
        """Move the tensors from memory to a file, in a folder that no other process and no later run reads.

        A checkpoint may have a hard link to a file of the folder. So an existing file, whose name says that it has this
        content, is not touched, and a new one has its name only when it is complete.
        """
        name, content = self._content(client, kind)
        if not (folder / name).exists():
            incomplete = folder / f".{name}"
            incomplete.write_bytes(content)
            incomplete.replace(folder / name)
        self.tensors, self.file = None, folder / name

    def save(self, folder: Path, client: int, kind: str, present: Collection[str]) -> str:
        """Write the file into a folder and sync it to disk; returns its name."""
        if self.file is not None and (self.file.name in present or link_or_copy(self.file, folder / self.file.name)):
            return self.file.name
        name, content = self._content(client, kind)
        if name not in present:
            write_whole(folder / name, lambda file: file.write(content))
        self.file = folder / name
        return name

    def _content(self, client: int, kind: str) -> tuple[str, bytes]:
        content = safetensors.torch.save({name: t.contiguous() for name, t in self.read().items()})
        return f"{client}.{kind}.{_digest(content)}.safetensors", content


def link_or_copy(source: Path, target: Path) -> bool:
    """Make a hard link to a file, or a copy if the file system has no hard links; returns whether the file exists."""
    try:
        with source.open("rb") as file:
            os.fsync(file.fileno())
            try:
                os.link(source, target)
            except FileExistsError:
                pass
            except OSError:
                write_whole(target, lambda copy: shutil.copyfileobj(file, copy))
    except FileNotFoundError:
        return False
    return True


def files_of(checkpoint: Path) -> Path:
    """The folder of clients' files that belongs to a checkpoint, e.g. ``last.clients`` to ``last.ckpt``."""
    return checkpoint.with_name(checkpoint.name.removesuffix(".ckpt") + ".clients")


def tidy(folder: Path, names: Collection[str]) -> None:
    """Remove a store's files that are not named, and the folder if it is then empty."""
    if not folder.is_dir():
        return
    keep = set(names)
    for name in set(os.listdir(folder)) - keep:
        if _NAME.fullmatch(name) or (name.startswith(".") and _NAME.match(name[1:])):  # the second: incomplete
            (folder / name).unlink(missing_ok=True)
    if not keep and not os.listdir(folder):
        folder.rmdir()


def remove_what_kills_left(root: Path) -> None:
    """Remove temporary files and clients' folders of killed runs below ``default_root_dir``; live runs keep theirs."""
    remove_leftovers(root, lambda folder: tidy(folder, []))


def _remove_folder(folder: Path, lock: int) -> None:
    """Remove the folder of a store."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _read_checked(folder: Path, name: str) -> tuple[int, str, State]:
    """Client, kind and tensors of a file, after a check of its digest.

    Raises:
        ValueError: If it is missing or was changed.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ValueError(f"{name!r} is not the name of a client file")
    if not (folder / name).is_file():
        raise ValueError(f"there is no {name}")
    content = (folder / name).read_bytes()
    if _digest(content) != parts["digest"]:
        raise ValueError(f"{name} is truncated or damaged")
    return int(parts["client"]), parts["kind"], safetensors.torch.load(content)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
