"""The values that server and clients exchange, and the persistent state of each side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_fedssl.functional.averaging import Sizes, State, sizes_of
from lightning_fedssl.functional.dictionaries import (
    add_prefix,
    map_values,
    select,
    tensors_of,
)
from lightning_fedssl.functional.frozen import frozen_names, tensors_that_change

Direction = Literal["down", "up"]
"""From the server to a client, or from a client to the server."""

Batch = dict[str, Tensor]
"""One step's tensors by name, each ``(batch, ...)``."""

Changes = dict[tuple[str, int], State]
"""Client states by kind and client; an empty state was deleted."""


@dataclass
class ServerState:
    """The state of the server between phases: the global model and what its optimisation needs.

    Frozen tensors are not part of it: every party has them before the run begins, and nothing
    changes them.

    Attributes:
        parameters: The global weights by name.
        buffers: The global model's buffers by name (normalisation statistics and the like).
        personal: The server's own personal weights and buffers by name. Clients do not receive
            them, except as the first values of their own.
        version: Counts the changes of the model, so that values derived from it are computed once.
        extra: Further states that a method stores at the server, by name.
        last_broadcast_version: The version that all clients have downloaded already, to compute the
            moments of static batch norm; -1 for none.
    """

    parameters: State
    buffers: State
    personal: State = field(default_factory=dict)
    version: int = 0
    extra: dict[str, State] = field(default_factory=dict)
    last_broadcast_version: int = -1

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        local_modules: Collection[str] = (),
        personal: Collection[str] = (),
    ) -> ServerState:
        """A copy of the weights and buffers of a module, without frozen ones.

        It shares no storage with the module.

        Args:
            module: The working module.
            local_modules: Names of submodules that are not part of the global model.
            personal: Names of the personal weights and buffers.
        """
        tensors = {
            name: t.detach().clone()
            for name, t in tensors_that_change(module).items()
            if not is_local(name, local_modules)
        }
        personal_tensors = {name: tensors.pop(name) for name in personal}
        buffers = {name: tensors.pop(name) for name, _ in module.named_buffers() if name in tensors}
        return cls(tensors, buffers, personal_tensors)

    def update(self, tensors: State) -> None:
        """Copy new values into the global model; tensors that are not named stay as they are.

        Args:
            tensors: Weights and buffers by name, the personal ones included.

        Raises:
            KeyError: The global model has no tensor of a name.
        """
        _copy_into(self.all_tensors(), tensors)
        self.version += 1

    def forget(self) -> None:
        """Forget all but the global model, as before the first round of a run."""
        self.extra = {}
        self.last_broadcast_version = -1

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device, except scalars of stored optimizer states: a step count may
        be on the CPU.
        """
        for state in (self.parameters, self.buffers, self.personal):
            state |= map_values(lambda t: t.to(device), state)
        for kind, state in self.extra.items():
            for name, t in state.items():
                if t.dim() or not kind.startswith("optimizer"):
                    state[name] = t.to(device)

    def model(self) -> State:
        """Parameters and buffers: what a client downloads by default."""
        return {**self.parameters, **self.buffers}

    def all_tensors(self) -> State:
        """Parameters, buffers and the server's own personal tensors."""
        return {**self.model(), **self.personal}


def named_payload(payload: State) -> State:
    """What a client sends beside its model, under the names of the ledger and of messages:
    ``payload.NAME``.
    """
    return add_prefix("payload.", payload)


@dataclass(frozen=True)
class ClientUpdate:
    """What one client uploads. Its tensors are those of the working module: valid until the next
    update is requested.

    Attributes:
        client: The client's number.
        parameters: Trained weights by name.
        buffers: Buffers that training changed, by name (batch-norm statistics; none for static
            batch norm).
        num_samples: Images the client trained on, the usual weight.
        num_steps: Local optimizer steps, tau_k.
        payload: Further tensors that a method uploads.
    """

    client: int
    parameters: State
    buffers: State
    num_samples: int
    num_steps: int
    payload: State = field(default_factory=dict)

    def to(self, device: torch.device, copy: bool = False) -> ClientUpdate:
        """The update with its tensors on a device; with ``copy`` they are copies in any case."""

        def moved(t: Tensor) -> Tensor:
            return t.detach().to(device, copy=copy)

        return replace(
            self,
            parameters=map_values(moved, self.parameters),
            buffers=map_values(moved, self.buffers),
            payload=map_values(moved, self.payload),
        )

    def model(self) -> State:
        """Weights and buffers."""
        return {**self.parameters, **self.buffers}

    def sizes(self) -> Sizes:
        """The bytes of every tensor by its name.

        A tensor of the payload is named ``payload.name``.
        """
        return sizes_of({**self.model(), **named_payload(self.payload)})


def is_local(name: str, local_modules: Collection[str]) -> bool:
    """Whether a weight or buffer of this name belongs to one of the local modules."""
    return name.partition(".")[0] in local_modules


def _copy_into(target: State, source: State) -> None:
    if unknown := source.keys() - target.keys():
        raise KeyError(f"the global model has no tensor named {', '.join(sorted(unknown))}")
    if source:
        with torch.no_grad():
            torch._foreach_copy_([target[name] for name in source], list(source.values()))


def frozen_state(module: nn.Module) -> State:
    """The frozen tensors of a module by name, not copied."""
    return map_values(Tensor.detach, select(tensors_of(module), frozen_names(module)))


def load_state(module: nn.Module, state: State) -> None:
    """Copy named parameters and buffers into a module.

    Tensors that are not named stay as they are. A module may replace a buffer by a new tensor, so
    its tensors are looked up in every call.

    Raises:
        KeyError: The module has no tensor of a name.
    """
    _copy_into(tensors_of(module), state)


class ClientStore:
    """The clients' persistent state: named tensors per client and kind. Most methods have none.

    The state of a client must not change if its update is rejected. So everything that is written
    while a client starts, trains and ends (inside :meth:`stage`) is staged until :meth:`commit`, or
    dropped by :meth:`discard`. A write outside of :meth:`stage`, such as in ``accumulate``, takes
    effect at once.

    Attributes:
        staging: The client of the current :meth:`stage` block; None outside.
        staged: By client, what it has written since it started, until :meth:`commit` or
            :meth:`discard`; ranks exchange it.
        files: The names of the files that hold clients' present states, by client as text; see
            :mod:`lightning_fedssl.storage.state_files`.
    """

    def __init__(self) -> None:
        self._kept: Changes = {}
        self.staged: dict[int, Changes] = {}
        self.staging: int | None = None
        self.files: dict[str, str] = {}

    def get(self, client: int, kind: str) -> State:
        """The stored tensors of one kind of a client; empty if there are none. Do not change them
        in place.

        Args:
            client: The client's number.
            kind: ``"optimizer"`` for optimizer states, any other name for a method's state.
        """
        staged = {} if self.staging is None else self.staged.get(self.staging, {})
        return staged.get((kind, client), self._kept.get((kind, client), {}))

    def put(self, client: int, kind: str, state: State) -> None:
        """Replace the tensors of a kind by copies of these; an empty state deletes them.

        Args:
            client: The client's number.
            kind: See :meth:`get`; without a dot.
            state: The tensors.

        Raises:
            ValueError: The state is not a dictionary of tensors.
        """
        if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
            raise ValueError(
                f"clients.put(..., {kind!r}, state): state is not a dict of tensors by name: "
                f"{state!r}"
            )
        copied = map_values(lambda t: t.detach().to("cpu", copy=True), state)
        if self.staging is None:
            self._keep({(kind, client): copied})
        else:
            self.staged.setdefault(self.staging, {})[kind, client] = copied

    # Acceptance of updates.

    @contextmanager
    def stage(self, client: int) -> Iterator[None]:
        """Stage what is written inside the block, under any number, until the client's update is
        accepted.

        Inside the block :meth:`get` returns what this client has written; all other methods see the
        committed state.

        Args:
            client: The client that trains.
        """
        before = self.staging
        self.staging = client
        try:
            yield
        finally:
            self.staging = before

    def commit(self, client: int) -> None:
        """Store the staged state of a client: its update is accepted, or it skipped the round."""
        self._keep(self.staged.pop(client, {}))

    def discard(self, client: int) -> None:
        """Drop the staged state of a client: its update is rejected."""
        self.staged.pop(client, None)

    def _keep(self, changes: Changes) -> None:
        """Store states; the tensors are not copied."""
        for key, state in changes.items():
            self.files.pop(str(key[1]), None)
            if state:
                self._kept[key] = state
            else:
                self._kept.pop(key, None)

    # All states.

    def with_state(self, kind: str) -> list[int]:
        """The clients with a state of this kind, in ascending order."""
        return sorted(client for stored_kind, client in self._kept if stored_kind == kind)

    def __len__(self) -> int:
        """The number of clients with a state."""
        return len({client for _, client in self._kept})

    def state_dict(self) -> dict[int, State]:
        """The stored tensors of every client that has some, named ``kind.name``."""
        states: dict[int, State] = {}
        for (kind, client), state in self._kept.items():
            states.setdefault(client, {}).update(add_prefix(f"{kind}.", state))
        return states

    def load_state_dict(self, states: Mapping[int, State]) -> None:
        """Replace all states by those that :meth:`state_dict` returned."""
        self._kept.clear()
        self.files.clear()
        for client, state in states.items():
            for name, t in state.items():
                kind, _, tensor_name = name.partition(".")
                self._kept.setdefault((kind, client), {})[tensor_name] = t
