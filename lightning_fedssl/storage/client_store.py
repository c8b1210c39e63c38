"""The persistent state of clients, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightning_fedssl.functional.averaging import State

Changes = dict[tuple[str, int], State]
"""Client states by kind and client; an empty state was deleted."""


class ClientStore:
    """The clients' persistent state: named tensors per client and kind. Most methods have none.

    The state of a client must not change if its update is rejected. So everything that is written while a client
    starts, trains and ends (inside :meth:`stage`) is staged until :meth:`commit`, or dropped by :meth:`discard`. A
    write outside of :meth:`stage`, such as in ``accumulate``, takes effect at once.
    """

    def __init__(self) -> None:
        self._kept: Changes = {}
        self._staged: dict[int, Changes] = {}
        self._staging: int | None = None
        self._changed: set[tuple[str, int]] = set()

    def get(self, client: int, kind: str) -> State:
        """The stored tensors of one kind of a client; empty if there are none. Do not change them in place.

        Args:
            client: The client's number.
            kind: ``"optimizer"`` for optimizer states, any other name for a method's state.
        """
        staged = {} if self._staging is None else self._staged.get(self._staging, {})
        return staged.get((kind, client), self._kept.get((kind, client), {}))

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
        copied = {name: t.detach().to("cpu", copy=True) for name, t in state.items()}
        if self._staging is None:
            self.apply({(kind, client): copied})
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
        self.apply(self._staged.pop(client, {}))

    def discard(self, client: int) -> None:
        """Drop the staged state of a client: its update is rejected."""
        self._staged.pop(client, None)

    # Exchange between ranks.

    def watch_changes(self) -> None:
        """Begin a phase of client training, with nothing staged and no :meth:`changes`."""
        self._staged.clear()
        self._changed.clear()

    def changes(self) -> Changes:
        """The states stored since :meth:`watch_changes`."""
        return {(kind, client): self.get(client, kind) for kind, client in sorted(self._changed)}

    def apply(self, changes: Changes) -> None:
        """Store states, such as the :meth:`changes` of another rank; the tensors are not copied."""
        for key, state in changes.items():
            self._changed.add(key)
            if state:
                self._kept[key] = state
            else:
                self._kept.pop(key, None)

    def staged(self, client: int) -> Changes:
        """What a client has written since it started."""
        return self._staged.get(client, {})

    def add_staged(self, client: int, changes: Changes) -> None:
        """Stage what a client has written on another rank."""
        self._staged[client] = changes

    # All states.

    def of(self, client: int) -> State:
        """All stored tensors of a client, named ``kind.name``; empty if there are none."""
        found = [(kind, state) for (kind, owner), state in self._kept.items() if owner == client]
        return {f"{kind}.{name}": t for kind, state in found for name, t in state.items()}

    def having(self, kind: str) -> list[int]:
        """The clients with a state of this kind, in ascending order."""
        return sorted(client for known, client in self._kept if known == kind)

    def __len__(self) -> int:
        """The number of clients with a state."""
        return len({client for _, client in self._kept})

    def clone(self) -> ClientStore:
        """A copy of the store; changes of the copy do not affect this store."""
        clone = ClientStore()
        clone._kept = dict(self._kept)
        return clone

    def state_dict(self) -> dict[int, State]:
        """Every client's tensors as :meth:`of` returns them."""
        found: dict[int, State] = {}
        for (kind, client), state in self._kept.items():
            found.setdefault(client, {}).update({f"{kind}.{name}": t for name, t in state.items()})
        return found

    def load_state_dict(self, states: Mapping[int, State]) -> None:
        """Replace all states by those that :meth:`state_dict` returned."""
        self._kept.clear()
        for client, state in states.items():
            for name, t in state.items():
                kind, _, own = name.partition(".")
                self._kept.setdefault((kind, client), {})[own] = t
