"""Clients that are ready to train together, and what their steps log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import clone_state, tensors_of
from lightning_fedssl.functional.recorded import Values
from lightning_fedssl.local_training.sequential import ClientPhase
from lightning_fedssl.local_work import LocalWork


@dataclass(eq=False)
class Client:
    """A client that is ready to train.

    Attributes:
        data: What it trains on.
        work: Its steps.
        received: A copy of the weights and buffers that it downloaded.
    """

    data: LocalData
    work: LocalWork
    received: State


def prepared(phase: ClientPhase, clients: Iterable[LocalData]) -> list[Client]:
    """The clients that will train, with copies of their initial weights."""
    ready = []
    for data in clients:
        work = phase.start(data)
        if work.num_steps:
            ready.append(Client(data, work, clone_state(tensors_of(phase.algorithm))))
    return ready


class NoRoomError(ValueError):
    """Clients do not fit into a device's memory together."""


@contextmanager
def room_for(number: int, fabric: Fabric) -> Iterator[None]:
    """Raise an error that names the keys to change if clients do not fit into a device's memory.

    Args:
        number: The clients that train together.
        fabric: Names the device.

    Raises:
        NoRoomError: Instead of :class:`torch.OutOfMemoryError`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoRoomError(
            f"{number} clients do not fit into the memory of {fabric.device} together: lower "
            "trainer.clients_at_once or data.client_batch_size, or share the clients out by "
            "trainer.devices"
        ) from error


Logged = defaultdict[str, list[tuple[Tensor, float, list[int]]]]
"""By name: values ``(rows,)``, their weight, and the rows."""


Ended = tuple[State, State]
"""A client's tensors after its last step, and the state of its optimizer."""


def add_logged(logged: Logged, values: Values, rows: list[int]) -> None:
    """Add what a step has logged for the clients of some rows."""
    for of_rows, name, weight in values:
        logged[name].append((of_rows, weight, rows))


def report(phase: ClientPhase, clients: Sequence[Client], logged: Logged) -> None:
    """Log each client's own means of the scalars of all its steps.

    Args:
        phase: What they were trained with.
        clients: Those of the rows, in order.
        logged: What the steps have logged.
    """
    for name, entries in logged.items():
        sums = torch.zeros(len(clients), dtype=torch.float64, device=entries[0][0].device)
        weights = [0.0] * len(clients)
        for values, weight, rows in entries:
            if weight:
                sums[rows] += values.double() * weight
            for row in rows:
                weights[row] += weight
        for client, total, weight in zip(clients, sums, weights, strict=True):
            if weight:
                with phase.algorithm.clients.stage(client.data.party):
                    phase.algorithm.log(name, total / weight, batch_size=weight)
