"""Vectorized training: many clients make a step at once over stacked weights, with the results of
sequential training.

The clients of a stack share no weight, so the gradient of the sum of their losses is, row by row,
each client's own gradient, and an element-wise optimizer over the stack is one optimizer per
client. Clients are sorted by their number of steps: those still training are always the first rows,
and the rows of a client that has finished are not touched. The losses come from the algorithm's own
``training_step`` under ``torch.func.vmap``. Batches of different sizes (the last one of an epoch)
have separate forward passes, so no batch is padded.

On a CUDA device steps that can be recorded are made by
:mod:`~lightning_fedssl.local_training.stack_memory` instead.

``training_step`` must not change attributes of its modules, because stacked clients share them;
weights and buffers are each client's own. Where the loss of one client depends on a weight and that
of another does not, the other's gradient of it is 0, not None: its momentum and weight decay go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import exclude, map_values, select, tensors_of
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.optimizer_states import (
    like,
    optimizer_state,
    part_of,
    set_learning_rate,
)
from lightning_fedssl.functional.optimizers import weights_of
from lightning_fedssl.functional.returned import LossError, place_of
from lightning_fedssl.functional.stacked_optimizer import rows_of, stacked_state
from lightning_fedssl.functional.stacking import stack_by_shape, stack_states
from lightning_fedssl.local_training.ready import (
    Client,
    Ended,
    Logged,
    NoRoomError,
    add_logged,
    prepared,
    report,
    room_for,
)
from lightning_fedssl.local_training.sequential import (
    ClientPhase,
    Loop,
)
from lightning_fedssl.local_training.stack_memory import QueuedClients, StackMemory
from lightning_fedssl.local_training.stacked_step import Part, StackedStep
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import ClientUpdate, load_state


def train_clients(
    phase: ClientPhase,
    clients: Sequence[LocalData],
    failed: Callable[[Exception], None] | None = None,
    memory: StackMemory | None = None,
) -> Iterator[ClientUpdate]:
    """Train the clients of one stack.

    The updates come in the clients' order, each valid until the next is requested.

    All clients start before the first of them ends. After the last step each client's result is
    loaded into the working module in turn, so that ``on_client_end`` finds there what it finds
    after sequential training; between the steps the working module holds no client's weights.

    Args:
        phase: What they are trained with: ``vmap`` must accept the algorithm's ``training_step``,
            and the class of the optimizer is in
            :data:`~lightning_fedssl.functional.stacked_optimizer.ELEMENTWISE`.
        clients: The data of each client to train.
        failed: Called with the error of a stack that could not be trained; its clients then train
            one after another. Left out: the error is raised.
        memory: For recorded steps on a CUDA device. Left out: no step is recorded.

    Yields:
        One update per client that made a step.

    Raises:
        NoRoomError: The clients do not fit into the device's memory.
    """
    ready = prepared(phase, clients)
    stack: Stack | QueuedClients | None = None
    if len(ready) > 1 and not any(client.work.train for client in ready):
        try:
            with room_for(len(ready), phase.fabric):
                stack = _trained(phase, ready, memory, len(clients))
        except (NoRoomError, LossError):
            raise
        except Exception as error:  # a genuine one is raised again
            if failed is None:
                raise
            failed(error)
    loop = Loop(phase.algorithm, phase.optimizer, phase.fabric)
    if stack is None:
        for client in ready:
            load_state(phase.algorithm, client.received)
            yield phase.train(loop, client.data, client.work)
        return
    report(phase, stack.clients, stack.logged)
    for client in ready:
        tensors, state = stack.ended[stack.clients.index(client)]
        load_state(phase.algorithm, tensors)
        update = phase.update(tensors_of(phase.algorithm), client.data, client.work)
        yield phase.finish(client.data, update, state.copy)


def _trained(
    phase: ClientPhase, ready: Sequence[Client], memory: StackMemory | None, size: int
) -> Stack | QueuedClients:
    """The clients after their steps, recorded ones where that is possible."""
    queued = memory and memory.stack(phase, ready, size)
    if queued:
        try:
            with own_random_stream(ready[0].data):
                queued.train()
            return queued
        except (torch.OutOfMemoryError, LossError):
            raise
        except Exception as error:
            queued.rows.recorded.give_up(place_of(error))
    stack = Stack(phase, ready)
    with own_random_stream(ready[0].data):
        stack.train()
    return stack


class StackedClients:
    """Weights and buffers of several clients, ``(clients, ...)`` each, and their optimizers.

    Args:
        phase: What they are trained with; the algorithm's own weights are not used.
        clients: The clients.
        is_own: Whether a client has a weight or buffer of its own.

    Raises:
        ValueError: The states of the clients' optimizers cannot be stacked.
    """

    def __init__(
        self,
        phase: ClientPhase,
        clients: Sequence[Client],
        is_own: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.phase = phase
        self.clients = clients
        weights = phase.algorithm.named_parameters()
        names = {id(p): name for name, p in weights if is_own(name)}
        self.template = part_of(phase.optimizer, names)
        self.order = [names[id(p)] for p in weights_of(self.template)]
        names_of_tensors = set(filter(is_own, clients[0].received))
        self.tensors = stack_states(
            [select(client.received, names_of_tensors) for client in clients]
        )
        states = [phase.kept_optimizer_state(client.data.party) for client in clients]
        self.optimizer_state = stacked_state(self.template, states)


class Stack(StackedClients):
    """Clients that train by themselves, and their losses.

    Args:
        phase: What they are trained with.
        clients: The clients.
    """

    def __init__(self, phase: ClientPhase, clients: Sequence[Client]) -> None:
        by_steps = sorted(clients, key=lambda client: -client.work.num_steps)
        super().__init__(phase, by_steps)
        self.logged: Logged = defaultdict(list)
        self.ended: dict[int, Ended] = {}

    def train(self) -> None:
        """Train every client for its own number of steps."""
        self.phase.algorithm.train()
        for width, steps in _phases([client.work.num_steps for client in self.clients]):
            self._train(width, steps)

    def _train(self, width: int, steps: range) -> None:
        """Train the clients of the first rows for some steps."""
        algorithm = self.phase.algorithm
        works = [client.work for client in self.clients[:width]]
        names = trained_weights(algorithm)
        leaves = {name: self.tensors[name][:width].requires_grad_() for name in names}
        rest = map_values(itemgetter(slice(width)), exclude(self.tensors, leaves))
        state = rows_of(self.optimizer_state, slice(width))
        optimizer = like(self.template, [leaves[name] for name in self.order], state)
        update = StackedStep(self.phase, leaves, rest, optimizer, corrected(leaves, works))
        parts: list[Part] = []
        for step in steps:
            if algorithm.step_factors:
                set_learning_rate(optimizer, algorithm.step_factors[step])
            batches = [work.batch(step) for work in works]
            parts = stack_by_shape(batches, [part for _, part in parts])
            for (rows, _), values in zip(parts, update(parts, step), strict=True):
                add_logged(self.logged, values, rows)
        self.optimizer_state = optimizer_state(optimizer)
        for row, work in enumerate(works):
            if work.num_steps == steps.stop:
                tensors = map_values(itemgetter(row), self.tensors)
                self.ended[row] = tensors, rows_of(self.optimizer_state, row)


def corrected(leaves: State, works: Sequence[LocalWork]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of weights and control variates, ``(clients, ...)`` each; 0 for a client without a
    control variate.
    """
    pairs = []
    for name in sorted(set().union(*(work.control_variate for work in works))):
        zero = torch.zeros_like(leaves[name][0])
        values = [work.control_variate.get(name, zero) for work in works]
        pairs.append((leaves[name], torch.stack(values)))
    return pairs


def _phases(num_steps: Sequence[int]) -> Iterator[tuple[int, range]]:
    """The number of clients that train in each range of steps, for numbers of steps in descending
    order.
    """
    first = 0
    for width in range(len(num_steps), 0, -1):
        if num_steps[width - 1] > first:
            yield width, range(first, num_steps[width - 1])
            first = num_steps[width - 1]
