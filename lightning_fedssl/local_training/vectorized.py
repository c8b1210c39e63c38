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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.by_name import copied, mapped, stacked
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.optimizers import weights_of
from lightning_fedssl.functional.recorded import Recorded, Values
from lightning_fedssl.functional.tied import places_of
from lightning_fedssl.local_training.sequential import (
    LocalTrainingObserver,
    Loop,
    LossError,
    Sent,
    add_to_gradients,
    finish,
    kept_optimizer_state,
    loss_of,
    may_record,
    own_random_stream,
    recording,
    start,
    train_client,
)
from lightning_fedssl.local_training.stacked_layers import StackedLayers
from lightning_fedssl.local_training.stacked_optimizer import StackedOptimizer
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate, LiveTensors, set_learning_rate

Part = tuple[list[int], Batch]
"""Rows of a stack, and a batch of each, ``(rows, batch, ...)``."""


@dataclass(eq=False)
class Client:
    """A client that is ready to train.

    Attributes:
        data: What it trains on.
        work: Its steps.
        received: A copy of the weights and buffers that it downloaded.
        owner: The number under which the state of its optimizer is stored.
    """

    data: LocalData
    work: LocalWork
    received: State
    owner: int


def train_clients(
    algorithm: FederatedAlgorithm,
    clients: Iterable[LocalData],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
    max_steps: int | None = None,
    failed: Callable[[Exception], None] | None = None,
) -> Iterator[ClientUpdate]:
    """Train the clients of one stack.

    The updates come in the clients' order, each valid until the next is requested.

    All clients start before the first of them ends. After the last step each client's result is
    loaded into the working module in turn, so that ``on_client_end`` finds there what it finds
    after sequential training; between the steps the working module holds no client's weights.

    Args:
        algorithm: The working module; its weights are overwritten. ``vmap`` must accept its
            ``training_step``.
        clients: The data of each client to train.
        optimizer: An optimizer whose class is in
            :data:`~lightning_fedssl.local_training.stacked_optimizer.ELEMENTWISE`, for its
            settings.
        fabric: For the precision and the backward pass.
        observer: Is called at every start, step and end.
        max_steps: The largest number of steps of a client.
        failed: Called with the error of a stack that could not be trained; its clients then train
            one after another. Left out: the error is raised.

    Yields:
        One update per client that made a step.

    Raises:
        NoRoomError: The clients do not fit into the device's memory.
    """
    ready = prepared(algorithm, clients, observer, max_steps)
    stack = None
    if len(ready) > 1 and not any(client.work.train for client in ready):
        try:
            with room_for(len(ready), fabric), own_random_stream(ready[0].data):
                stack = Stack(algorithm, ready, optimizer)
                stack.train(fabric, observer)
        except (NoRoomError, LossError):
            raise
        except Exception as error:  # a genuine one is raised again
            if failed is None:
                raise
            failed(error)
            stack = None
    if stack is None:
        loop = Loop(algorithm, optimizer, fabric)
        for client in ready:
            loop.live.load(client.received)
            yield train_client(loop, client.data, client.work, observer, client.owner)
        return
    stack.report()
    live = LiveTensors(algorithm)
    sent = Sent.of(algorithm)
    for client in ready:
        live.load(stack.tensors_of(client))
        update = sent.update(live.model(), client.data, client.work)
        new = stack.optimizer_state_of(client) if algorithm.keep_client_optimizer else {}
        yield finish(algorithm, client.data, update, observer, new, client.owner)


def prepared(
    algorithm: FederatedAlgorithm,
    clients: Iterable[LocalData],
    observer: LocalTrainingObserver,
    max_steps: int | None,
) -> list[Client]:
    """The clients that will train, with copies of their initial weights."""
    live = LiveTensors(algorithm)
    ready = []
    for data in clients:
        work = start(algorithm, live, data, observer, max_steps)
        if work.num_steps:
            received = copied(live.model())
            ready.append(Client(data, work, received, algorithm.state_owner(data.party)))
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
            "trainer.clients_at_once "
            "or data.client_batch_size, or share the clients out by trainer.devices"
        ) from error


class Stack:
    """Weights and buffers of several clients, ``(clients, ...)`` each, their optimizers and their
    losses.

    Args:
        algorithm: Gives the loss; its own weights are not used.
        clients: The clients.
        template: Gives the optimizer's class and settings.

    Raises:
        ValueError: The states of the clients' optimizers cannot be stacked.
    """

    def __init__(
        self, algorithm: FederatedAlgorithm, clients: Sequence[Client], template: Optimizer
    ) -> None:
        self.algorithm = algorithm
        self.clients = sorted(clients, key=lambda client: -client.work.num_steps)
        self.step_module = CallOf(algorithm, "training_step")
        self.places = places_of(algorithm)
        names = {id(p): name for name, p in algorithm.named_parameters()}
        self.order = [names[id(p)] for p in weights_of(template)]
        self.trainable = [*trained_weights(algorithm)]
        received = [client.received for client in self.clients]
        self.tensors = stacked(received)
        self.optimizers = StackedOptimizer(
            template, [kept_optimizer_state(algorithm, c.owner) for c in self.clients]
        )
        self.leaves: State = {}
        self.rest: State = {}
        self.logged: defaultdict[str, list[tuple[Tensor, float, list[int]]]] = defaultdict(list)

    def tensors_of(self, client: Client) -> State:
        """A client's weights and buffers, not copied."""
        row = self.clients.index(client)
        return mapped(itemgetter(row), self.tensors)

    def optimizer_state_of(self, client: Client) -> State:
        """The state of a client's optimizer."""
        return self.optimizers.state_of(self.clients.index(client))

    def train(self, fabric: Fabric, observer: LocalTrainingObserver) -> None:
        """Train every client for its own number of steps.

        Args:
            fabric: For the precision and the backward pass.
            observer: Is called at every step of every client.
        """
        self.algorithm.train()
        for width, steps in _phases([client.work.num_steps for client in self.clients]):
            self._train(width, steps, fabric, observer)

    def _train(
        self, width: int, steps: range, fabric: Fabric, observer: LocalTrainingObserver
    ) -> None:
        """Train the clients of the first rows for some steps."""
        algorithm = self.algorithm
        works = [client.work for client in self.clients[:width]]
        self.leaves = {name: self.tensors[name][:width].requires_grad_() for name in self.trainable}
        self.rest = {name: t[:width] for name, t in self.tensors.items() if name not in self.leaves}
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
                observer.client_batch_ended(step)

    def _corrected(self, works: Sequence[LocalWork]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of weights and control variates, ``(clients, ...)`` each.

        0 for a client without a control variate.
        """
        names = sorted({name for work in works for name in work.control_variate})
        zeros = {name: torch.zeros_like(self.tensors[name][0]) for name in names}
        return [
            (
                self.leaves[name],
                torch.stack([work.control_variate.get(name, zeros[name]) for work in works]),
            )
            for name in names
        ]

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
            leaves, rest = (mapped(itemgetter(index), part) for part in (leaves, rest))
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
        logged: Values = []

        def of_one_client(
            leaves: State, rest: State, batch: Batch
        ) -> tuple[Tensor, list[Tensor], State]:
            given = placed({**leaves, **rest}, self.places)
            with recording(self.algorithm, logged):
                returned = functional_call(
                    self.step_module, given, (batch, step), tie_weights=False
                )
            if (loss := loss_of(returned, self.algorithm, "training_step")) is None:
                raise ValueError("training_step returned None, to skip the batch")
            replaced = {name: given[f"algorithm.{name}"] for name in rest}
            return (
                loss.reshape(()),
                [value for value, *_ in logged],
                {name: new for name, new in replaced.items() if new is not rest[name]},
            )

        with StackedLayers():
            losses, values, replaced = vmap(of_one_client, randomness="different")(
                leaves, rest, batch
            )
        names = [(name, weight) for _, name, weight in logged]
        return losses, [(v, *of) for v, of in zip(values, names, strict=True)], replaced

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
                    with self.algorithm.clients.stage(client.data.party):
                        self.algorithm.log(name, total / weight, batch_size=weight)


class CallOf(nn.Module):
    """A function of an algorithm as a forward pass, so that ``functional_call`` can run it with
    other weights.

    Args:
        algorithm: The algorithm.
        function: The function's name.
    """

    def __init__(self, algorithm: FederatedAlgorithm, function: str) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.function = function

    def forward(self, *arguments: object) -> object:
        """What the function returns."""
        return getattr(self.algorithm, self.function)(*arguments)


def placed(tensors: State, places: Mapping[str, str]) -> State:
    """The tensors for ``functional_call`` of a module around the algorithm, with
    ``tie_weights=False``.
    """
    return {f"algorithm.{place}": tensors[name] for place, name in places.items()}


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
