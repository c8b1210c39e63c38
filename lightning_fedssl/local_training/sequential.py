"""One client after another through the one live module: the readable reference, and the fast path on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from lightning_fedssl.local_training.keyed_dropout import keyed
from lightning_fedssl.state import (
    Batch,
    ClientUpdate,
    LocalWork,
    load_optimizer_state,
    load_state,
    optimizer_state,
    set_learning_rate,
)


class LocalTrainingObserver(Protocol):
    """What the loop wants to hear from an engine."""

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int]) -> None:
        """A client has received its broadcast, of these bytes by name, and prepared its work."""

    def client_batch_ended(self, step: int) -> None:
        """A client has made a step."""

    def client_ended(self, update: ClientUpdate) -> None:
        """A client has finished."""


def train_clients(
    algorithm: FederatedAlgorithm,
    clients: Iterable[LocalData],
    optimizer: Optimizer,
    fabric: Fabric,
    observer: LocalTrainingObserver,
    max_steps: int | None = None,
) -> Iterator[ClientUpdate]:
    """Train clients one after another; each update is valid until the next is asked for.

    Args:
        algorithm: The live module; its weights are overwritten.
        clients: The data of each client to train.
        optimizer: The optimizer over the live module's parameters; its learning rate is set.
        fabric: Gives precision and the backward pass.
        observer: Told of every start, step and end.
        max_steps: Steps of a client at most.

    Yields:
        One update per client that made a step.
    """
    for data in clients:
        work = start(algorithm, data, observer, max_steps)
        if work.num_steps == 0:
            continue
        keeper = algorithm.keeper(data.party)
        kept = algorithm.clients.get(keeper, "optimizer") if algorithm.keep_client_optimizer else {}
        load_optimizer_state(optimizer, kept)
        with own_random_stream(data):
            train(
                algorithm, work, keyed(algorithm, data, algorithm.training_step), optimizer, fabric, "client/loss",
                observer.client_batch_ended,
            )  # fmt: skip
        if algorithm.keep_client_optimizer:
            algorithm.clients.put(keeper, "optimizer", optimizer_state(optimizer))
        yield end(algorithm, data, work, observer)


def train(
    algorithm: FederatedAlgorithm,
    work: LocalWork,
    step_loss: Callable[[Batch, int], Tensor | None],
    optimizer: Optimizer,
    fabric: Fabric,
    loss_name: str,
    batch_ended: Callable[[int], None],
) -> None:
    """The one loop over batches, for a client and for the server.

    Args:
        algorithm: The live module, holding the start weights.
        work: The batches.
        step_loss: Loss of a batch; None skips it.
        optimizer: Over the module's parameters, with the state it shall start from.
        fabric: Gives precision and the backward pass.
        loss_name: The scalar under which the mean loss is logged.
        batch_ended: Called after each step.
    """
    algorithm.train()
    parameters = [p for p in algorithm.parameters() if p.requires_grad]
    named = dict(algorithm.named_parameters())
    corrected = [(named[name], value) for name, value in work.correction.items()]
    for step, batch in enumerate(work):
        if algorithm.step_factors:
            set_learning_rate(optimizer, algorithm.step_factors[step])
        optimizer.zero_grad(set_to_none=True)
        with fabric.autocast():
            loss = step_loss(batch, step)
        if loss is None:
            continue
        fabric.backward(loss)
        if algorithm.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, algorithm.gradient_clip_norm, foreach=True)
        add_to_gradients(corrected)
        optimizer.step()
        algorithm.log(loss_name, loss.detach(), batch_size=len(next(iter(batch.values()))))
        batch_ended(step)


@contextmanager
def own_random_stream(data: LocalData) -> Iterator[None]:
    """Seed torch's generators for one party and round, for layers that draw and are no dropout; restore them later.

    Args:
        data: The party's data.
    """
    device = data.images.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.stream_key(data.seed, "network", data.round, data.party))
        yield


def add_to_gradients(corrected: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to each weight's gradient; a weight that the loss did not reach has a gradient of 0.

    Args:
        corrected: Pairs of a weight and what is added.
    """
    for weight, value in corrected:
        if weight.grad is None:
            weight.grad = value.clone()
        else:
            weight.grad.add_(value)


def start(
    algorithm: FederatedAlgorithm, data: LocalData, observer: LocalTrainingObserver, max_steps: int | None
) -> LocalWork:
    """Load what a client receives into the live module, and let it prepare its work."""
    received: State = algorithm.broadcast(data.party)
    load_state(algorithm, received)
    work = algorithm.on_client_start(data).limited(max_steps)
    load_state(algorithm, work.asked)
    observer.client_started(data, work, algorithm.download_sizes(data.party, {**received, **work.asked}))
    return work


def end(
    algorithm: FederatedAlgorithm, data: LocalData, work: LocalWork, observer: LocalTrainingObserver
) -> ClientUpdate:
    """The update of a client whose result the live module holds."""
    weights = {name: p.detach() for name, p in algorithm.named_parameters() if p.requires_grad}
    live_buffers = dict(algorithm.named_buffers())
    buffers = {name: live_buffers[name] for name in algorithm.uploaded_buffers()}
    update = algorithm.on_client_end(ClientUpdate(data.party, weights, buffers, work.num_samples, work.num_steps))
    observer.client_ended(update)
    return update
