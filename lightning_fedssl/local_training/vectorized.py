"""Vectorized training: many clients make a step at once over stacked weights, with the results of sequential training.

The clients of a stack share no weight, so the gradient of the sum of their losses is, row by row, each client's own
gradient, and an element-wise optimizer over the stack is one optimizer per client. Clients are sorted by their number
of steps: those still training are always the first rows, and the rows of a client that has finished are not touched.
The losses come from the algorithm's own ``training_step`` under ``torch.func.vmap``. Batches of different sizes (the
last one of an epoch) have separate forward passes, so no batch is padded.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from lightning_fedssl import keyed_dropout, sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.tied import places_of
from lightning_fedssl.keyed_dropout import KeyedDropout
from lightning_fedssl.local_training.ops.loss_check import LossError, check_loss
from lightning_fedssl.local_training.ops.network_options import uncompiled
from lightning_fedssl.local_training.ops.stacked_layers import StackedLayers
from lightning_fedssl.local_training.ops.stacked_optimizer import ClientOptimizers, client_optimizers
from lightning_fedssl.local_training.sequential import (
    LocalTrainingObserver,
    Loop,
    add_to_gradients,
    end,
    start,
    train_client,
)
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate, LiveTensors


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


StackTrainer = Callable[
    [FederatedAlgorithm, Sequence[Client], Sequence[State], Optimizer, Fabric, LocalTrainingObserver], "Stack | None"
]
"""Trains clients, sorted by falling number of steps, from their optimizer states; returns None if it cannot."""


def train_clients(
    algorithm: FederatedAlgorithm,
    clients: Iterable[LocalData],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
    max_steps: int | None = None,
    *,
    clients_at_once: int,
    trainer: StackTrainer | None = None,
    halved: Callable[[int], None] = lambda clients: None,
    failed: Callable[[Exception], None] | None = None,
) -> Iterator[ClientUpdate]:
    """Train clients stacked; the updates come in the clients' order, each valid until the next is requested.

    All clients of a stack start before the first of them ends. After the last step each client's result is loaded into
    the working module in turn, so that ``on_client_end`` finds there what it finds after sequential training; between
    the steps the working module holds no client's weights.

    Args:
        algorithm: The working module; its weights are overwritten. ``vmap`` must accept its ``training_step``.
        clients: The data of each client to train.
        optimizer: An optimizer whose class is in
            :data:`~lightning_fedssl.local_training.ops.stacked_optimizer.ELEMENTWISE`, for its settings.
        fabric: For the precision and the backward pass.
        observer: Is called at every start, step and end.
        max_steps: The largest number of steps of a client.
        clients_at_once: The number of clients in a stack, without those that skip the round.
        trainer: Trains a stack instead of the default, if it can.
        halved: Called with the size of a smaller stack, if a stack did not fit into the device's memory.
        failed: Called with the error of a stack that could not be trained; its clients then train one after another.
            Left out: the error is raised.

    Yields:
        One update per client that made a step.

    Raises:
        NoRoomError: A single client does not fit.
    """
    training = prepared(algorithm, clients, observer, max_steps)
    while together := list(islice(training, clients_at_once)):
        yield from _train_together(algorithm, together, optimizer, fabric, observer, trainer, halved, failed)
        together.clear()  # frees their views before the next clients make theirs


def prepared(
    algorithm: FederatedAlgorithm, clients: Iterable[LocalData], observer: LocalTrainingObserver, max_steps: int | None
) -> Iterator[Client]:
    """The clients that will train, with copies of their initial weights."""
    live = LiveTensors(algorithm)
    for data in clients:
        work = start(algorithm, live, data, observer, max_steps)
        if work.num_steps:
            received = {**live.parameters(), **live.buffers()}
            yield Client(data, work, {name: t.detach().clone() for name, t in received.items()})


def _train_together(
    algorithm: FederatedAlgorithm,
    clients: Sequence[Client],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
    trainer: StackTrainer | None,
    halved: Callable[[int], None],
    failed: Callable[[Exception], None] | None,
) -> Iterator[ClientUpdate]:
    """Train a stack, or two of half the size if it does not fit; one function, so that all memory is freed.

    If a step of the stack fails, its clients train one after another. On a CPU a single client does so, too: its bits
    would depend on whether an earlier round of this process had two clients for the compatibility check.
    """
    if len(clients) == 1 and fabric.device.type == "cpu":
        yield from _one_after_another(algorithm, clients, optimizer, fabric, observer)
        return
    longest_first = sorted(clients, key=lambda client: -client.work.num_steps)
    keeps = algorithm.keep_client_optimizer
    owners = [algorithm.state_owner(client.data.party) for client in longest_first]
    kept = [algorithm.clients.get(owner, "optimizer") if keeps else {} for owner in owners]
    remedy = "lower data.client_batch_size or use a smaller model.network"
    stack, stackable = None, True
    try:
        with uncompiled(algorithm), room_for(len(clients), fabric, remedy):
            stack = trainer(algorithm, longest_first, kept, optimizer, fabric, observer) if trainer else None
            stack = stack or train_in_new_memory(algorithm, longest_first, kept, optimizer, fabric, observer)
    except NoRoomError:
        if len(clients) == 1:
            raise
    except LossError:
        raise
    except Exception as error:  # a genuine one is raised again
        if failed is None:
            raise
        failed(error)
        stackable = False
    if not stackable:
        kept.clear()
        yield from _one_after_another(algorithm, clients, optimizer, fabric, observer)
        return
    if stack is None:
        kept.clear()
        free_memory(fabric.device)
        half = -(-len(clients) // 2)
        halved(half)
        for part in (clients[:half], clients[half:]):
            yield from _train_together(algorithm, part, optimizer, fabric, observer, trainer, halved, failed)
        return
    stack.report([client.data.party for client in longest_first])
    live, uploaded = LiveTensors(algorithm), algorithm.uploaded_buffers()
    for client in clients:
        row = longest_first.index(client)
        live.load(stack.row(row))
        new = stack.state_of(row) if keeps else {}
        yield end(algorithm, live, uploaded, client.data, client.work, observer, new)


def _one_after_another(
    algorithm: FederatedAlgorithm,
    clients: Sequence[Client],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
) -> Iterator[ClientUpdate]:
    """Train clients that have started already one after another."""
    loop, uploaded = Loop(algorithm, optimizer, fabric), algorithm.uploaded_buffers()
    for client in clients:
        loop.live.load(client.received)
        owner = algorithm.state_owner(client.data.party)
        yield train_client(loop, uploaded, client.data, client.work, observer, owner)


def free_memory(device: torch.device) -> None:
    """Free a CUDA device's memory after an error, whose traceback holds the tensors of its functions."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class NoRoomError(ValueError):
    """Clients do not fit into a device's memory together."""


@contextmanager
def room_for(number: int, fabric: Fabric, remedy: str) -> Iterator[None]:
    """Raise an error that names the keys to change if clients do not fit into a device's memory.

    Args:
        number: The clients that train together.
        fabric: Names the device.
        remedy: The keys to set.

    Raises:
        NoRoomError: Instead of :class:`torch.OutOfMemoryError`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoRoomError(
            f"{number} clients do not fit into the memory of {fabric.device} together: {remedy}"
        ) from error


def train_in_new_memory(
    algorithm: FederatedAlgorithm,
    clients: Sequence[Client],
    kept: Sequence[State],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
) -> Stack:
    """The default :data:`StackTrainer`."""
    stack = Stack.of(algorithm, clients)
    optimizers = client_optimizers(optimizer, kept)
    stack.train([client.work for client in clients], in_order(optimizer, algorithm), optimizers, fabric, observer)
    return stack


def in_order(optimizer: Optimizer, algorithm: FederatedAlgorithm) -> list[str]:
    """Names of the optimizer's parameters in its order."""
    names = {id(p): name for name, p in algorithm.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


class Stack:
    """Weights and buffers of several clients, ``(clients, ...)`` each, and their losses.

    Args:
        algorithm: Gives the loss; its own weights are not used.
        received: What each client starts from, by name; it is copied.
        keys: Of each client's dropout.
    """

    def __init__(self, algorithm: FederatedAlgorithm, received: Sequence[State], keys: Sequence[int]) -> None:
        self.algorithm = algorithm
        self.step_module = _Step(algorithm)
        self.places = places_of(algorithm)
        self.trainable = [name for name, p in algorithm.named_parameters() if p.requires_grad]
        self.tensors = {name: torch.stack([state[name] for state in received]) for name in received[0]}
        device = next(iter(self.tensors.values())).device
        self.keys = torch.tensor(keys).to(device, non_blocking=True)
        self.sums: State = {}
        self.weights: dict[str, list[float]] = {}
        self.optimizers: ClientOptimizers | None = None
        # The rows of each pass of a step with several passes, and the weights that its losses reach.
        self.partial_passes: list[tuple[Sequence[int], set[str]]] = []
        self.leaves: State = {}
        self.narrow(len(received))

    @classmethod
    def of(cls, algorithm: FederatedAlgorithm, clients: Sequence[Client]) -> Stack:
        """The stack of these clients."""
        return cls(algorithm, [c.received for c in clients], [keyed_dropout.key_of(c.data) for c in clients])

    def state_of(self, row: int) -> State:
        """The state of a client's optimizer."""
        assert self.optimizers is not None
        return self.optimizers.state_of(row)

    def row(self, client: int) -> State:
        """One client's weights and buffers, not copied."""
        return {name: t[client] for name, t in self.tensors.items()}

    def narrow(self, width: int) -> None:
        """Train only the first ``width`` clients from now on."""
        self.leaves = {name: self.tensors[name][:width].requires_grad_() for name in self.trainable}
        self.rest = {name: t[:width] for name, t in self.tensors.items() if name not in self.leaves}

    def train(
        self,
        works: Sequence[LocalWork],
        order: Sequence[str],
        optimizers: ClientOptimizers,
        fabric: Fabric,
        observer: LocalTrainingObserver,
    ) -> None:
        """Train every client for its own number of steps.

        Args:
            works: Longest first.
            order: Names of the weights in the optimizer's order.
            optimizers: Of the same clients.
            fabric: For the precision and the backward pass.
            observer: Is called at every step of every client.
        """
        self.algorithm.train()
        self.optimizers = optimizers
        for width, steps in _phases([work.num_steps for work in works]):
            self.narrow(width)
            optimizers.narrow([self.leaves[name] for name in order])
            corrected = self._corrected(works[:width])
            for step in steps:
                with fabric.autocast():
                    loss = self.loss([work.batch(step) for work in works[:width]], step)
                fabric.backward(loss)
                if self.algorithm.gradient_clip_norm is not None:
                    clip_gradients(self.leaves.values(), self.algorithm.gradient_clip_norm)
                absent = self._absent(works[:width], order)
                if absent:
                    optimizers = self.optimizers = optimizers.with_absent()
                add_to_gradients(corrected)
                if self.algorithm.step_factors:
                    optimizers.set_learning_rate(self.algorithm.step_factors[step])
                optimizers.step(absent)
                self.zero_grad()
                for _ in range(width):
                    observer.client_batch_ended(step)

    def _absent(self, works: Sequence[LocalWork], order: Sequence[str]) -> dict[int, set[int]]:
        """The rows in which a weight has no gradient, for weights that have one in other rows.

        The optimizer of a single client would leave such a weight as it is. In the stack its gradient is 0, with which
        momentum and weight decay would move it.
        """
        alike = all(reached == self.partial_passes[0][1] for _, reached in self.partial_passes)
        corrects = any(work.control_variate for work in works)
        if alike and (not corrects or all(leaf.grad is not None for leaf in self.leaves.values())):
            return {}
        everyone = set(range(len(works)))
        whole_pass = (list(everyone), {name for name, leaf in self.leaves.items() if leaf.grad is not None})
        passes = self.partial_passes or [whole_pass]
        absent: dict[int, set[int]] = {}
        for i, name in enumerate(order):
            rows = {row for of_pass, reached in passes if name in reached for row in of_pass}
            rows |= {row for row, work in enumerate(works) if name in work.control_variate}
            if rows and rows != everyone:
                absent[i] = everyone - rows
        return absent

    def _corrected(self, works: Sequence[LocalWork]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of weights and control variates, ``(clients, ...)`` each; 0 for a client without a control variate."""
        names = sorted({name for work in works for name in work.control_variate})
        zeros = {name: torch.zeros_like(self.tensors[name][0]) for name in names}
        return [
            (self.leaves[name], torch.stack([work.control_variate.get(name, zeros[name]) for work in works]))
            for name in names
        ]

    def report(self, clients: Sequence[int]) -> None:
        """Log each client's own means of the scalars of all its steps.

        Args:
            clients: The number of the client of each row.
        """
        for name, sums in self.sums.items():
            for client, total, weight in zip(clients, sums, self.weights[name], strict=False):
                if weight and self.algorithm.collector is not None:
                    with self.algorithm.clients.stage(client):
                        self.algorithm.collector(name, total / weight, weight)

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def loss(self, batches: Sequence[Batch], step: int) -> Tensor:
        """The sum of the clients' losses; buffers are updated, and what a step logs is logged.

        Args:
            batches: One batch per client that still trains.
            step: The step's number.
        """
        self.partial_passes.clear()
        losses = [self._pass(batches, rows, step) for rows in of_one_shape(batches)]
        return sum(losses[1:], start=losses[0])

    def _pass(self, batches: Sequence[Batch], rows: list[int], step: int) -> Tensor:
        """The sum of the losses of the clients in these rows, whose batches have one shape."""
        batch = {name: torch.stack([batches[row][name] for row in rows]) for name in batches[rows[0]]}
        if len(rows) == len(batches):
            losses, replaced = self._losses(self.leaves, self.rest, batch, step, self.keys[: len(rows)], rows)
            for name, new in replaced.items():
                self.rest[name].copy_(new)
        else:
            index = torch.tensor(rows).to(next(iter(self.tensors.values())).device, non_blocking=True)
            leaves, rest = ({k: t.index_select(0, index) for k, t in part.items()} for part in (self.leaves, self.rest))
            self.partial_passes.append((rows, _note_reached(leaves)))
            losses, replaced = self._losses(leaves, rest, batch, step, self.keys[index], rows)
            written = {name: t.detach() for name, t in leaves.items() if t._version}  # by the step itself, in place
            for name, new in {**rest, **replaced, **written}.items():
                self.tensors[name].detach()[: len(batches)].index_copy_(0, index, new)
        self._log("client/loss", losses, len(next(iter(batches[rows[0]].values()))), rows)
        return losses.sum()

    def _losses(
        self, leaves: State, rest: State, batch: Batch, step: int | Tensor, keys: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, State]:
        """Each client's loss ``(clients,)``, and the buffers that the step replaced by new tensors.

        What the step logs is added to the sums of these rows.
        """
        logged: list[tuple[str, float]] = []
        drops = not keyed_dropout.known_without(self.algorithm)

        def of_one_client(leaves: State, rest: State, batch: Batch, key: State) -> tuple[Tensor, list[Tensor], State]:
            values: list[Tensor] = []
            given = placed({**leaves, **rest}, self.places)
            dropout = KeyedDropout(key["step"]) if drops else None
            with _recording(self.algorithm, logged, values), dropout or nullcontext():
                loss = functional_call(self.step_module, given, (batch, step), tie_weights=False)
            if loss is None:
                raise ValueError("training_step returned None, to skip the batch")
            check_loss(loss, self.algorithm, "training_step")
            replaced = {name: given[f"algorithm.{name}"] for name in rest}
            return loss.reshape(()), values, {name: new for name, new in replaced.items() if new is not rest[name]}

        key = {"step": sampling.fold_in(keys, step)} if drops else {}
        with StackedLayers():
            losses, values, replaced = vmap(of_one_client)(leaves, rest, batch, key)
        for (name, weight), of_clients in zip(logged, values, strict=True):
            self._log(name, of_clients, weight, rows)
        return losses, replaced

    def _log(self, name: str, values: Tensor, weight: float, rows: Sequence[int]) -> None:
        """Add a scalar of the clients in these rows, ``(rows,)``, to their sums, each with the same weight."""
        if weight == 0:
            return
        if name not in self.sums:
            self.sums[name] = torch.zeros(len(self.keys), dtype=torch.float64, device=self.keys.device)
            self.weights[name] = [0.0] * len(self.keys)
        values = values.detach().double().to(self.keys.device)
        if len(rows) == rows[-1] + 1:
            self.sums[name][: len(rows)].add_(values, alpha=weight)
        else:
            index = torch.tensor(rows).to(self.keys.device, non_blocking=True)
            self.sums[name].index_add_(0, index, values, alpha=weight)
        for row in rows:
            self.weights[name][row] += weight


def _note_reached(leaves: State) -> set[str]:
    """The names of the weights that get a gradient, complete after the backward pass."""
    reached: set[str] = set()
    for name, leaf in leaves.items():
        leaf.register_hook(partial(_add_name, reached, name))
    return reached


def _add_name(names: set[str], name: str, gradient: Tensor) -> None:
    names.add(name)


class _Step(nn.Module):
    """``training_step`` as a forward pass, so that ``functional_call`` can run it with other weights."""

    def __init__(self, algorithm: FederatedAlgorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, batch: Batch, step: int | Tensor) -> Tensor | None:
        return self.algorithm.training_step(batch, cast(int, step))  # a tensor where steps are recorded


def placed(tensors: State, places: Mapping[str, str]) -> State:
    """The tensors for ``functional_call`` of a module around the algorithm, with ``tie_weights=False``."""
    return {f"algorithm.{place}": tensors[name] for place, name in places.items()}


@contextmanager
def _recording(algorithm: FederatedAlgorithm, logged: list[tuple[str, float]], values: list[Tensor]) -> Iterator[None]:
    """Collect what the algorithm logs: names and weights, and separately the values, which differ between clients."""

    def record(name: str, value: Any, weight: float) -> None:
        logged.append((name, weight))
        values.append(value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64))

    kept, algorithm.collector = algorithm.collector, record
    try:
        yield
    finally:
        algorithm.collector = kept


def _phases(num_steps: Sequence[int]) -> Iterator[tuple[int, range]]:
    """The number of clients that train in each range of steps, for numbers of steps in descending order."""
    first = 0
    for width in range(len(num_steps), 0, -1):
        if num_steps[width - 1] > first:
            yield width, range(first, num_steps[width - 1])
            first = num_steps[width - 1]


def of_one_shape(batches: Sequence[Batch]) -> list[list[int]]:
    """Groups of rows whose batches have equal shapes."""
    rows = defaultdict(list)
    for row, batch in enumerate(batches):
        rows[tuple((name, t.shape) for name, t in batch.items())].append(row)
    return list(rows.values())


def clip_gradients(leaves: Iterable[Tensor], max_norm: float) -> None:
    """Scale each client's gradient down to a norm over all its weights, as ``clip_grad_norm_`` does for one client.

    Args:
        leaves: The weights, ``(clients, ...)`` each, with gradients.
        max_norm: Largest L2 norm of a client's gradient.
    """
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not gradients:
        return
    norms = torch.linalg.vector_norm(torch.cat([g.reshape(len(g), -1) for g in gradients], 1), dim=1)
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, [factors.reshape(-1, *[1] * (g.dim() - 1)) for g in gradients])
