"""Sequential training: one client after another in the working module. The reference, and fast on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.keyed_dropout import drawing, keyed
from lightning_fedssl.local_training.ops.backward import backward_of
from lightning_fedssl.local_training.ops.clipping import clip_norm
from lightning_fedssl.local_training.ops.loss_check import check_gradient, check_loss, checked
from lightning_fedssl.local_training.ops.optimizer_step import step_of
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import (
    Batch,
    ClientUpdate,
    LiveTensors,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)


class LocalTrainingObserver(Protocol):
    """The events that a local trainer reports to the loop."""

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: State) -> None:
        """A client has received its broadcast, of these bytes by name, and prepared its work.

        Args:
            data: What the client trains on.
            work: Its steps.
            sizes: Bytes that it has downloaded, by name.
            received: The broadcast; its tensors are not copied.
        """

    def client_batch_ended(self, step: int) -> None:
        """A client has made a step."""

    def client_ended(self, update: ClientUpdate) -> None:
        """A client has finished."""


class NoObserver:
    """A :class:`LocalTrainingObserver` that ignores all events."""

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: State) -> None:
        """Nothing."""

    def client_batch_ended(self, step: int) -> None:
        """Nothing."""

    def client_ended(self, update: ClientUpdate) -> None:
        """Nothing."""


class ServerSide(Protocol):
    """What a client receives from its server; in a simulation the algorithm itself."""

    def broadcast(self, client: int) -> State:
        """What one client downloads."""

    def download_sizes(self, client: int, received: State) -> dict[str, int]:
        """Bytes of each tensor of a client's download, by name."""

    def state_owner(self, client: int) -> int:
        """The number under which the optimizer state of a client is stored."""


def train_clients(
    algorithm: FederatedAlgorithm,
    clients: Iterable[LocalData],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
    max_steps: int | None = None,
    server: ServerSide | None = None,
) -> Iterator[ClientUpdate]:
    """Train clients one after another; each update is valid until the next is requested.

    Args:
        algorithm: The working module; its weights are overwritten.
        clients: The data of each client to train.
        optimizer: The optimizer over the working module's parameters; its learning rate is set.
        fabric: For the precision and the backward pass.
        observer: Is called at every start, step and end.
        max_steps: Steps of a client at most.
        server: What the clients receive; the algorithm on this machine if left out.

    Yields:
        One update per client that made a step.
    """
    loop, uploaded, server = Loop(algorithm, optimizer, fabric), algorithm.uploaded_buffers(), server or algorithm
    for data in clients:
        work = start(algorithm, loop.live, data, observer, max_steps, server)
        if work.num_steps == 0:
            continue
        yield train_client(loop, uploaded, data, work, observer, server.state_owner(data.party))


class Loop:
    """The only loop over batches, for clients and server. It collects the module's tensors once.

    Args:
        algorithm: The working module.
        optimizer: Over the module's parameters.
        fabric: For the precision and the backward pass.
    """

    def __init__(self, algorithm: FederatedAlgorithm, optimizer: Optimizer, fabric: Fabric) -> None:
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.fabric = fabric
        self.live = LiveTensors(algorithm)
        self.weights = [p for p in algorithm.parameters() if p.requires_grad]
        self.layers = list(algorithm.modules())
        self.backward = backward_of(fabric)
        self.loss_name = ""

    def train(
        self,
        work: LocalWork,
        step_loss: Callable[[Batch, int], Tensor | None],
        loss_name: str,
        batch_ended: Callable[[int], None],
    ) -> None:
        """Train one party; the module holds its initial weights, the optimizer its initial state.

        Args:
            work: The batches.
            step_loss: Loss of a batch; None skips it.
            loss_name: The scalar under which the mean loss is logged.
            batch_ended: Called after each step.
        """
        algorithm, move = self.algorithm, step_of(self.optimizer)
        self.loss_name = loss_name
        self._train_mode()
        corrected = self._corrected(work)
        losses: defaultdict[int, list[Tensor]] = defaultdict(list)
        for step, batch in enumerate(work):
            if algorithm.step_factors:
                set_learning_rate(self.optimizer, algorithm.step_factors[step])
            for weight in self.weights:
                weight.grad = None
            loss = self.loss_and_gradients(batch, step, step_loss)
            if loss is None:
                continue
            if algorithm.gradient_clip_norm is not None:
                clip_norm(self.weights, algorithm.gradient_clip_norm)
            add_to_gradients(corrected)
            move()
            losses[next(iter(batch.values())).shape[0]].append(loss.detach())
            batch_ended(step)
        for weight in self.weights:
            weight.grad = None  # the memory is free while others train
        for size, of_batches in losses.items():
            mean = torch.stack(of_batches).mean(dtype=torch.float64)
            algorithm.log(loss_name, mean, batch_size=size * len(of_batches))

    def loss_and_gradients(
        self, batch: Batch, step: int, step_loss: Callable[[Batch, int], Tensor | None]
    ) -> Tensor | None:
        """The loss of a batch, and its gradients in the weights; None, and no gradients, for a batch to skip."""
        with self.fabric.autocast():
            loss = step_loss(batch, step)
        if loss is not None:
            self._check_loss(loss)
            self.backward(loss)
        return loss

    def _check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that is not one number, or has no gradient."""
        function = "server_training_step" if self.loss_name.startswith("server") else "training_step"
        check_loss(loss, self.algorithm, function)
        check_gradient(loss, self.algorithm, function)

    def _train_mode(self) -> None:
        """Set training mode, if it is not set: setting the mode takes ten times as long as reading it."""
        if not all(layer.training for layer in self.layers):
            self.algorithm.train()

    def _corrected(self, work: LocalWork) -> list[tuple[Tensor, Tensor]]:
        named = self.live.parameters() if work.control_variate else {}
        return [(named[name], value) for name, value in work.control_variate.items()]


def train_client(
    loop: Loop,
    uploaded: Sequence[str],
    data: LocalData,
    work: LocalWork,
    observer: LocalTrainingObserver,
    owner: int,
) -> ClientUpdate:
    """Train a client that has started; the working module holds its initial weights.

    Args:
        loop: The loop over its batches.
        uploaded: Names of the buffers that it uploads.
        data: The client's data.
        work: Its steps.
        observer: Is called at every step and at the end.
        owner: The number under which the state of its optimizer is stored.
    """
    algorithm, optimizer = loop.algorithm, loop.optimizer
    kept = algorithm.clients.get(owner, "optimizer") if algorithm.keep_client_optimizer else {}
    load_optimizer_state(optimizer, kept)
    with own_random_stream(data), algorithm.clients.stage(data.party):
        step_loss = keyed(algorithm, data, algorithm.training_step)
        loop.train(work, step_loss, "client/loss", observer.client_batch_ended)
    new = optimizer_state(optimizer) if algorithm.keep_client_optimizer else {}
    return end(algorithm, loop.live, uploaded, data, work, observer, new, owner)


@contextmanager
def own_random_stream(data: LocalData) -> Iterator[None]:
    """Seed torch's generators for one party and round, for random layers other than dropout; restore them at the end.

    Args:
        data: The party's data.
    """
    generators = _generators(data.images.device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(sampling.derive_key(data.seed, "network", data.round, data.party))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """The generators that layers draw from; ``torch.manual_seed`` would take 0.1 ms to search all kinds of devices."""
    on_device = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [torch.default_generator, *on_device]


def add_to_gradients(corrected: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to each weight's gradient; a weight that the loss did not reach has a gradient of 0.

    Args:
        corrected: Pairs of a weight and what is added.
    """
    for weight, value in corrected:
        if weight.grad is None:
            weight.grad = torch.empty_like(weight).copy_(value)  # fused kernels need the weight's memory layout
        else:
            weight.grad.add_(value)


def start(
    algorithm: FederatedAlgorithm,
    live: LiveTensors,
    data: LocalData,
    observer: LocalTrainingObserver,
    max_steps: int | None,
    server: ServerSide | None = None,
) -> LocalWork:
    """Load what a client receives into the working module, and let the client prepare its work.

    What the client writes to the client store is staged; it is committed at once if the client skips the round, because
    there will be no update to accept.

    Args:
        algorithm: The working module.
        live: Its weights and buffers.
        data: The client's data.
        observer: Is called when the client has prepared its work.
        max_steps: Steps of the client at most.
        server: What the client receives; the algorithm on this machine if left out.
    """
    server = server or algorithm
    with algorithm.clients.stage(data.party):
        received: State = checked(server.broadcast(data.party), Mapping, algorithm, "broadcast", "tensors by name")
        live.load(received)
        with drawing(algorithm, data.images.device, 0, data.seed, "dropout before training", data.round, data.party):
            work = algorithm.on_client_start(data)
        work = checked(work, LocalWork, algorithm, "on_client_start", "a LocalWork").limited(max_steps)
        if work.extra_download:
            live.load(work.extra_download)
        sizes = server.download_sizes(data.party, {**received, **work.extra_download})
        observer.client_started(data, work, sizes, received)
    if work.num_steps == 0:
        algorithm.clients.commit(data.party)
    return work


def end(
    algorithm: FederatedAlgorithm,
    live: LiveTensors,
    uploaded: Sequence[str],
    data: LocalData,
    work: LocalWork,
    observer: LocalTrainingObserver,
    optimizer: State,
    owner: int | None = None,
) -> ClientUpdate:
    """The update of a client whose result the working module holds, with the buffers of these names."""
    weights = {name: p.detach() for name, p in live.parameters().items() if p.requires_grad}
    buffers = live.buffers() if uploaded else {}
    sent = {name: buffers[name] for name in uploaded}
    update = ClientUpdate(data.party, weights, sent, work.num_samples, work.num_steps, dict(work.payload))
    return finish(algorithm, data, update, observer, optimizer, owner)


def finish(
    algorithm: FederatedAlgorithm,
    data: LocalData,
    update: ClientUpdate,
    observer: LocalTrainingObserver,
    optimizer: State,
    owner: int | None = None,
) -> ClientUpdate:
    """Let a client complete its update; its persistent state is staged until the update is accepted.

    Args:
        algorithm: The algorithm; its working module holds the client's result where clients train one by one.
        data: The client's data.
        update: The trained weights and buffers.
        observer: Is called with the completed update.
        optimizer: The state of the client's optimizer; stored with ``keep_client_optimizer`` alone.
        owner: The number under which it is stored; the algorithm's ``state_owner`` of the client if left out.
    """
    with algorithm.clients.stage(update.client):
        if algorithm.keep_client_optimizer:
            owner = algorithm.state_owner(update.client) if owner is None else owner
            algorithm.clients.put(owner, "optimizer", optimizer)
        with drawing(algorithm, data.images.device, 0, data.seed, "dropout after training", data.round, data.party):
            completed = algorithm.on_client_end(update)
        update = checked(completed, ClientUpdate, algorithm, "on_client_end", "the update")
        observer.client_ended(update)
    return update
