"""Vectorized training: many clients make a step at once over stacked weights, with the results of
sequential training.

The clients of a stack share no weight, so the gradient of the sum of their losses is, row by row,
each client's own gradient, and an element-wise optimizer over the stack is one optimizer per
client. Clients are sorted by their number of steps: those still training are always the first rows,
and the rows of a client that has finished are not touched. The losses come from the algorithm's own
``training_step`` under ``torch.func.vmap``. Batches of different sizes (the last one of an epoch)
have separate forward passes, so no batch is padded.

``training_step`` must not change attributes of its modules, because stacked clients share them;
weights and buffers are each client's own. A weight that only some clients' batches reach has a
gradient of 0 for the others, which momentum and weight decay move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.by_name import copied, mapped, only, prefixed, stacked, without
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.optimizer_states import set_learning_rate
from lightning_fedssl.functional.optimizers import weights_of
from lightning_fedssl.functional.recorded import Recorded, Values
from lightning_fedssl.local_training.sequential import (
    ClientPhase,
    Loop,
    LossError,
    add_to_gradients,
    loss_of,
    may_record,
    own_random_stream,
    recording,
)
from lightning_fedssl.local_training.stacked_layers import StackedLayers
from lightning_fedssl.local_training.stacked_optimizer import StackedOptimizer, part_of
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate, LiveTensors

Part = tuple[list[int], Batch]
"""Rows of a stack, and a batch of each, ``(rows, batch, ...)``."""


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


def train_clients(
    phase: ClientPhase,
    clients: Iterable[LocalData],
    failed: Callable[[Exception], None] | None = None,
) -> Iterator[ClientUpdate]:
    """Train the clients of one stack.

    The updates come in the clients' order, each valid until the next is requested.

    All clients start before the first of them ends. After the last step each client's result is
    loaded into the working module in turn, so that ``on_client_end`` finds there what it finds
    after sequential training; between the steps the working module holds no client's weights.

    Args:
        phase: What they are trained with: ``vmap`` must accept the algorithm's ``training_step``,
            and the class of the optimizer is in
            :data:`~lightning_fedssl.local_training.stacked_optimizer.ELEMENTWISE`.
        clients: The data of each client to train.
        failed: Called with the error of a stack that could not be trained; its clients then train
            one after another. Left out: the error is raised.

    Yields:
        One update per client that made a step.

    Raises:
        NoRoomError: The clients do not fit into the device's memory.
    """
    ready = prepared(phase, clients)
    stack = None
    if len(ready) > 1 and not any(client.work.train for client in ready):
        try:
            with room_for(len(ready), phase.fabric), own_random_stream(ready[0].data):
                stack = Stack(phase, ready)
                stack.train()
        except (NoRoomError, LossError):
            raise
        except Exception as error:  # a genuine one is raised again
            if failed is None:
                raise
            failed(error)
            stack = None
    loop = Loop(phase.algorithm, phase.optimizer, phase.fabric)
    if stack is None:
        for client in ready:
            loop.live.load(client.received)
            yield phase.train(loop, client.data, client.work)
        return
    stack.report()
    for client in ready:
        loop.live.load(stack.tensors_of(client))
        update = loop.sent.update(loop.live.model(), client.data, client.work)
        yield phase.finish(client.data, update, partial(stack.optimizer_state_of, client))


def prepared(phase: ClientPhase, clients: Iterable[LocalData]) -> list[Client]:
    """The clients that will train, with copies of their initial weights."""
    live = LiveTensors(phase.algorithm)
    ready = []
    for data in clients:
        work = phase.start(live, data)
        if work.num_steps:
            ready.append(Client(data, work, copied(live.model())))
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


class StackedClients:
    """Weights and buffers of several clients, ``(clients, ...)`` each, and their optimizers.

    Args:
        phase: What they are trained with; the algorithm's own weights are not used.
        clients: The clients.
        function: The function of the algorithm that :meth:`call` calls.
        own: Whether a client has a weight or buffer of its own.

    Raises:
        ValueError: The states of the clients' optimizers cannot be stacked.
    """

    def __init__(
        self,
        phase: ClientPhase,
        clients: Sequence[Client],
        function: str,
        own: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.phase = phase
        self.clients = clients
        self.module = CallOf(phase.algorithm, function)
        weights = phase.algorithm.named_parameters()
        names = {id(p): name for name, p in weights if own(name)}
        template = part_of(phase.optimizer, names)
        self.order = [names[id(p)] for p in weights_of(template)]
        theirs = set(filter(own, clients[0].received))
        self.tensors = stacked([only(client.received, theirs) for client in clients])
        kept = [phase.kept_optimizer_state(client.data.party) for client in clients]
        self.optimizers = StackedOptimizer(template, kept)
        self.leaves: State = {}
        self.rest: State = {}

    def call(self, leaves: State, rest: State, *arguments: Any) -> tuple[Any, State]:
        """What the function returns with one client's tensors, and the buffers that it has replaced
        by new tensors, instead of changing them in place.

        Args:
            leaves: The client's weights.
            rest: Its other tensors.
            arguments: Those of the function.
        """
        given = prefixed("algorithm.", {**leaves, **rest})
        returned = functional_call(self.module, given, arguments, tie_weights=False)
        after = {name: given[f"algorithm.{name}"] for name in rest}
        return returned, {name: t for name, t in after.items() if t is not rest[name]}


class Stack(StackedClients):
    """Clients that train by themselves, and their losses.

    Args:
        phase: What they are trained with.
        clients: The clients.
    """

    def __init__(self, phase: ClientPhase, clients: Sequence[Client]) -> None:
        by_steps = sorted(clients, key=lambda client: -client.work.num_steps)
        super().__init__(phase, by_steps, "training_step")
        self.trainable = [*trained_weights(phase.algorithm)]
        self.logged: defaultdict[str, list[tuple[Tensor, float, list[int]]]] = defaultdict(list)

    def tensors_of(self, client: Client) -> State:
        """A client's weights and buffers, not copied."""
        row = self.clients.index(client)
        return mapped(itemgetter(row), self.tensors)

    def optimizer_state_of(self, client: Client) -> State:
        """The state of a client's optimizer."""
        return self.optimizers.state_of(self.clients.index(client))

    def train(self) -> None:
        """Train every client for its own number of steps."""
        self.phase.algorithm.train()
        for width, steps in _phases([client.work.num_steps for client in self.clients]):
            self._train(width, steps)

    def _train(self, width: int, steps: range) -> None:
        """Train the clients of the first rows for some steps."""
        algorithm = self.phase.algorithm
        fabric = self.phase.fabric
        works = [client.work for client in self.clients[:width]]
        self.leaves = {name: self.tensors[name][:width].requires_grad_() for name in self.trainable}
        self.rest = mapped(itemgetter(slice(width)), without(self.tensors, self.leaves))
        optimizer = self.optimizers.narrow([self.leaves[name] for name in self.order])
        corrected = self._corrected(works)

        def update(parts: list[Part], number: int | Tensor) -> list[Values]:
            optimizer.zero_grad()
            with fabric.autocast():
                passes = [self._pass(rows, batch, number) for rows, batch in parts]
            fabric.backward(torch.cat([values[0][0] for values in passes]).sum())
            if algorithm.gradient_clip_norm is not None:
                clip_gradients(self.leaves.values(), algorithm.gradient_clip_norm)
            add_to_gradients(corrected)
            optimizer.step()
            return [[(t.detach(), name, x) for t, name, x in values] for values in passes]

        def together(batch: Batch, number: int | Tensor) -> Values:
            return update([(list(range(width)), batch)], number)[0]

        name = f"{type(algorithm).__name__}.training_step"
        recorded = Recorded(together, name, may_record(algorithm, optimizer))
        for step in steps:
            if algorithm.step_factors:
                set_learning_rate(optimizer, algorithm.step_factors[step])
            parts = _by_shape([work.batch(step) for work in works])
            results = [recorded(parts[0][1], step)] if len(parts) == 1 else update(parts, step)
            for (rows, _), values in zip(parts, results, strict=True):
                for of_rows, logged, weight in values:
                    self.logged[logged].append((of_rows, weight, rows))
            for _ in works:
                self.phase.observer.client_batch_ended(step)

    def _corrected(self, works: Sequence[LocalWork]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of weights and control variates, ``(clients, ...)`` each; 0 for a client without a
        control variate.
        """
        corrected = []
        for name in sorted(set().union(*(work.control_variate for work in works))):
            zero = torch.zeros_like(self.tensors[name][0])
            values = [work.control_variate.get(name, zero) for work in works]
            corrected.append((self.leaves[name], torch.stack(values)))
        return corrected

    def _pass(self, rows: list[int], batch: Batch, step: int | Tensor) -> Values:
        """The losses of the clients in these rows, ``(rows,)``, and the values that they log.

        Buffers are updated.
        """
        leaves = self.leaves
        rest = self.rest
        if everyone := len(rows) == len(next(iter(leaves.values()))):
            index: Any = slice(None)
        else:
            index = torch.tensor(rows, device=next(iter(leaves.values())).device)
            leaves = mapped(itemgetter(index), leaves)
            rest = mapped(itemgetter(index), rest)
        losses, values, replaced = self._losses(leaves, rest, batch, step)
        for name, new in (replaced if everyone else {**rest, **replaced}).items():
            self.rest[name][index] = new.detach()
        return [(losses, "client/loss", len(next(iter(batch.values()))[0])), *values]

    def _losses(
        self, leaves: State, rest: State, batch: Batch, step: int | Tensor
    ) -> tuple[Tensor, Values, State]:
        """Each client's loss ``(clients,)``, what it logs, and the buffers that the step
        replaced.
        """
        algorithm = self.phase.algorithm
        logged: Values = []

        def of_one_client(
            leaves: State, rest: State, batch: Batch
        ) -> tuple[Tensor, list[Tensor], State]:
            with recording(algorithm, logged):
                returned, replaced = self.call(leaves, rest, batch, step)
            if (loss := loss_of(returned, algorithm, "training_step")) is None:
                raise ValueError("training_step returned None, to skip the batch")
            return loss.reshape(()), [value for value, *_ in logged], replaced

        with StackedLayers():
            step_of_all = vmap(of_one_client, randomness="different")
            losses, values, replaced = step_of_all(leaves, rest, batch)
        of_clients = [
            (value, name, weight) for value, (_, name, weight) in zip(values, logged, strict=True)
        ]
        return losses, of_clients, replaced

    def report(self) -> None:
        """Log each client's own means of the scalars of all its steps."""
        for name, logged in self.logged.items():
            sums = torch.zeros(len(self.clients), dtype=torch.float64, device=logged[0][0].device)
            weights = [0.0] * len(self.clients)
            for values, weight, rows in logged:
                if weight:
                    sums[rows] += values.double() * weight
                for row in rows:
                    weights[row] += weight
            for client, total, weight in zip(self.clients, sums, weights, strict=True):
                if weight:
                    with self.phase.algorithm.clients.stage(client.data.party):
                        self.phase.algorithm.log(name, total / weight, batch_size=weight)


class CallOf(nn.Module):
    """A function of an algorithm as a forward pass, so that ``functional_call`` can run it with
    other weights.

    Args:
        algorithm: The method of the run.
        function: The function's name.
    """

    def __init__(self, algorithm: FederatedAlgorithm, function: str) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.function = function

    def forward(self, *arguments: object) -> object:
        """What the function returns."""
        return getattr(self.algorithm, self.function)(*arguments)


def _by_shape(batches: Sequence[Batch]) -> list[Part]:
    """The clients whose batches have one shape, each with their batches stacked."""
    by_shape = defaultdict(list)
    for row, batch in enumerate(batches):
        by_shape[tuple((name, t.shape) for name, t in batch.items())].append(row)
    return [(rows, stacked([batches[row] for row in rows])) for rows in by_shape.values()]


def _phases(num_steps: Sequence[int]) -> Iterator[tuple[int, range]]:
    """The number of clients that train in each range of steps, for numbers of steps in descending
    order.
    """
    first = 0
    for width in range(len(num_steps), 0, -1):
        if num_steps[width - 1] > first:
            yield width, range(first, num_steps[width - 1])
            first = num_steps[width - 1]


def clip_gradients(leaves: Iterable[Tensor], max_norm: float) -> None:
    """Scale each client's gradient down to a norm over all its weights, as ``clip_grad_norm_`` does
    for one client.

    Args:
        leaves: The weights, ``(clients, ...)`` each, with gradients.
        max_norm: Largest L2 norm of a client's gradient.
    """
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not gradients:
        return
    norms = torch.linalg.vector_norm(
        torch.cat([g.reshape(len(g), -1) for g in gradients], 1), dim=1
    )
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.reshape(-1, *[1] * (gradient.dim() - 1)))
