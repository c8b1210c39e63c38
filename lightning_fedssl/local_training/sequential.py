"""Sequential training: one client after another in the working module. The reference, and fast on a
CPU.

Layers that draw random numbers, such as dropout, draw them from torch's generators, which are
seeded for each party and round. Stacked clients share one stream, so their dropout masks differ
from those of sequential training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.functional.averaging import Sizes, State
from lightning_fedssl.functional.dictionaries import select, tensors_of
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.gradients import add_to_gradients
from lightning_fedssl.functional.optimizer_states import (
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from lightning_fedssl.functional.optimizers import steps_are_alike
from lightning_fedssl.functional.recorded import Function, Recorded, Values
from lightning_fedssl.functional.returned import LossError, loss_of, wrong_type
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate, load_state


class LocalTrainingObserver(Protocol):
    """The events that a local trainer reports to the loop; a class that derives from it ignores
    those that it does not override.
    """

    def client_started(
        self, data: LocalData, work: LocalWork, sizes: Sizes, received: State
    ) -> None:
        """A client has received its broadcast, of these bytes by name, and prepared its work.

        Args:
            data: What the client trains on.
            work: Its steps.
            sizes: Bytes that it has downloaded, by name.
            received: The broadcast; its tensors are not copied.
        """
        return

    def client_ended(self, update: ClientUpdate) -> None:
        """A client has finished."""
        return


class ServerSide(Protocol):
    """What a client receives from its server; in a simulation the algorithm itself."""

    def broadcast(self, client: int) -> State:
        """What one client downloads."""

    def download_sizes(self, client: int, received: State) -> Sizes:
        """Bytes of each tensor of a client's download, by name."""

    def state_owner(self, client: int) -> int:
        """The number under which the optimizer state of a client is stored."""


@dataclass(frozen=True)
class ClientPhase:
    """What the clients of a phase are trained with.

    Attributes:
        algorithm: The working module; its weights are overwritten.
        optimizer: The clients' optimizer over its weights; its learning rate is set.
        fabric: For the precision, the backward pass and the optimizer's steps.
        observer: Is called at every start and end.
        max_steps: Steps of a client at most; None for no limit.
        server: What the clients receive; the algorithm on this machine if left out.
        batch_ended: Called after each step of a client; None if no callback overrides the hook.
            With it, clients are stacked in split learning alone.
    """

    algorithm: FederatedAlgorithm
    optimizer: Optimizer
    fabric: Fabric
    observer: LocalTrainingObserver
    max_steps: int | None = None
    server: ServerSide | None = None
    batch_ended: Callable[[int], object] | None = None

    @cached_property
    def uploaded(self) -> tuple[list[str], list[str]]:
        """The names of the weights and of the buffers that clients upload."""
        return self.algorithm.uploaded_weights(), self.algorithm.uploaded_buffers()

    def update(self, tensors: State, data: LocalData, work: LocalWork) -> ClientUpdate:
        """The update of a client that has made its steps.

        Args:
            tensors: The client's weights and buffers; weights that it does not have are not sent.
            data: Its data.
            work: Its steps.
        """
        weights, buffers = self.uploaded
        return ClientUpdate(
            data.party,
            {name: tensors[name].detach() for name in weights if name in tensors},
            {name: tensors[name] for name in buffers},
            work.num_samples,
            work.num_steps,
            dict(work.payload),
        )

    def start(self, data: LocalData) -> LocalWork:
        """Load what a client receives into the working module, and let the client prepare its work.

        What the client writes to the client store is staged.

        Args:
            data: The client's data.
        """
        algorithm = self.algorithm
        party = data.party
        server = self.server or algorithm
        with algorithm.clients.stage(party):
            received = server.broadcast(party)
            if not isinstance(received, Mapping):
                raise wrong_type(received, algorithm, "broadcast", "tensors by name")
            load_state(algorithm, {**received, **algorithm.own_part(party)})
            with own_random_stream(data, "before training"):
                work = algorithm.on_client_start(data)
            if not isinstance(work, LocalWork):
                raise wrong_type(work, algorithm, "on_client_start", "a LocalWork")
            work = work.limited(self.max_steps)
            if work.extra_download:
                load_state(algorithm, work.extra_download)
            sizes = server.download_sizes(party, {**received, **work.extra_download})
            self.observer.client_started(data, work, sizes, received)
        return work

    def train(self, loop: Loop, data: LocalData, work: LocalWork) -> ClientUpdate:
        """Train a client that has started; the working module holds its initial weights.

        Args:
            loop: The loop over its batches.
            data: The client's data.
            work: Its steps.
        """
        load_optimizer_state(self.optimizer, self.kept_optimizer_state(data.party))
        with self.algorithm.clients.stage(data.party), own_random_stream(data):
            loop.train(work, "training_step", "client/loss", self.batch_ended)
        update = self.update(tensors_of(self.algorithm), data, work)
        return self.finish(data, update, lambda: optimizer_state(self.optimizer))

    def kept_optimizer_state(self, client: int) -> State:
        """The state with which a client's optimizer starts: empty, or that of its last round
        (``keep_client_optimizer``).
        """
        if not self.algorithm.keep_client_optimizer:
            return {}
        return self.algorithm.clients.get(self._owner(client), "optimizer")

    def _owner(self, client: int) -> int:
        return (self.server or self.algorithm).state_owner(client)

    def finish(
        self, data: LocalData, update: ClientUpdate, optimizer: Callable[[], State]
    ) -> ClientUpdate:
        """Let a client complete its update.

        Its persistent state is staged until the update is accepted.

        Args:
            data: The client's data.
            update: The trained weights and buffers; the working module holds them, too, where
                clients train one by one.
            optimizer: Returns the state of the client's optimizer, which ``keep_client_optimizer``
                stores.
        """
        algorithm = self.algorithm
        clients = algorithm.clients
        with clients.stage(data.party):
            if algorithm.keep_client_optimizer:
                clients.put(self._owner(data.party), "optimizer", optimizer())
            if algorithm.personal:
                personal = select(tensors_of(algorithm), algorithm.personal)
                clients.put(data.party, "personal", personal)
            with own_random_stream(data, "after training"):
                update = algorithm.on_client_end(update)
            if not isinstance(update, ClientUpdate):
                raise wrong_type(update, algorithm, "on_client_end", "the update")
            self.observer.client_ended(update)
        return update


def train_clients(phase: ClientPhase, clients: Iterable[LocalData]) -> Iterator[ClientUpdate]:
    """Train clients one after another; each update is valid until the next is requested.

    Args:
        phase: What they are trained with.
        clients: The data of each client to train.

    Yields:
        One update per client that made a step.
    """
    loop = Loop(phase.algorithm, phase.optimizer, phase.fabric)
    for data in clients:
        work = phase.start(data)
        if work.num_steps:
            yield phase.train(loop, data, work)


class Loop:
    """The only loop over batches, for clients and server.

    Args:
        algorithm: The working module.
        optimizer: Over the module's parameters.
        fabric: For the precision, the backward pass and the optimizer's steps.
    """

    def __init__(self, algorithm: FederatedAlgorithm, optimizer: Optimizer, fabric: Fabric) -> None:
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.fabric = fabric
        self.weights = trained_weights(algorithm)
        self.modules = [*algorithm.modules()]

    def train(
        self,
        work: LocalWork,
        function: str,
        loss_name: str,
        batch_ended: Callable[[int], object] | None,
    ) -> None:
        """Train one party; the module holds its initial weights, the optimizer its initial state.

        Args:
            work: The batches.
            function: The algorithm's function that returns the loss of a batch, alone or in a
                dictionary; None skips the batch.
            loss_name: The scalar under which the mean loss is logged.
            batch_ended: Called after each step, if somebody listens.
        """
        algorithm = self.algorithm
        if work.train is not None:
            work.train(work.num_steps, batch_ended)
            self._delete_gradients()
            return
        corrected = [(self.weights[name], value) for name, value in work.control_variate.items()]
        if not all(module.training for module in self.modules):
            algorithm.train()
        step_of = self._step(function, corrected)
        losses = defaultdict(list)
        for step, batch in enumerate(work):
            if algorithm.step_factors:
                set_learning_rate(self.optimizer, algorithm.step_factors[step])
            for value, logged, weight in step_of(batch, step):
                if logged:
                    algorithm.log(logged, value, batch_size=weight)
                else:
                    losses[weight].append(value)
                    if batch_ended:
                        batch_ended(step)
        self._delete_gradients()  # the memory is free while others train
        for size, of_batches in losses.items():
            mean = torch.stack(of_batches).mean(dtype=torch.float64)
            algorithm.log(loss_name, mean, batch_size=size * len(of_batches))

    def _step(self, function: str, corrected: Sequence[tuple[Tensor, Tensor]]) -> Function:
        """A step on a batch, recorded on a CUDA device.

        Args:
            function: Returns the loss of a batch.
            corrected: Weights with what is added to their gradients.
        """
        algorithm, fabric = self.algorithm, self.fabric
        training_step = getattr(algorithm, function)
        max_norm = algorithm.gradient_clip_norm
        if max_norm is None and corrected:
            # Clips nothing, but a scaled gradient must be unscaled before it is corrected.
            max_norm = math.inf

        def update(batch: Batch, number: int | Tensor) -> Values:
            self._delete_gradients()
            values: Values = []
            with fabric.autocast(), recording(algorithm, values):
                loss = loss_of(training_step(batch, number), algorithm, function)
            if loss is None:
                return values
            if not loss.requires_grad:
                raise LossError(
                    f"{type(algorithm).__name__}.{function} returned a loss that depends on no "
                    "weight: compute it from the network's output, without detach() or "
                    "torch.no_grad(), or return None to skip the batch"
                )
            fabric.backward(loss)
            if max_norm is not None:
                fabric.clip_gradients(
                    algorithm, self.optimizer, max_norm=max_norm, error_if_nonfinite=False
                )
            if corrected:
                add_to_gradients(corrected)
            fabric.strategy.optimizer_step(self.optimizer)
            return [*values, (loss.detach(), "", next(iter(batch.values())).shape[0])]

        if fabric.device.type != "cuda":
            return update
        name = f"{type(algorithm).__name__}.{function}"
        return Recorded(update, name, may_record(algorithm, self.optimizer))

    def _delete_gradients(self) -> None:
        """Do what the optimizer's ``zero_grad`` does, without its 10 microseconds for profiling."""
        for weight in self.weights.values():
            weight.grad = None


@contextmanager
def recording(algorithm: FederatedAlgorithm, values: Values) -> Iterator[None]:
    """Collect what the algorithm logs inside, so that a step can return it; the scalars of the
    round do not get it here.

    Args:
        algorithm: The method of the run.
        values: Receives the values, each with its name and weight.
    """
    logged = algorithm.logged
    before = len(logged)
    try:
        yield
    finally:
        for name, value, weight, _ in logged[before:]:
            if not isinstance(value, Tensor):
                value = torch.tensor(float(value), dtype=torch.float64)
            values.append((value, name, weight))
        del logged[before:]


def may_record(algorithm: FederatedAlgorithm, optimizer: Optimizer) -> bool:
    """Whether a step changes between calls by its batch alone: no learning rate that is set for
    every step, no optimizer that counts its steps on the host, and no first step that differs from
    the others.
    """
    return not algorithm.step_factors and steps_are_alike(optimizer)
