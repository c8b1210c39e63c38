"""Split learning: clients with the bottom of a network and a server with its top train together,
step by step.

At every step each client sends features, the server makes one step on the features of all of them,
and each client receives the gradient of its own. On several ranks every rank has its share of the
clients and a copy of the server: features are gathered without their autograd graph, every rank
makes the same step of the server, and backpropagates its clients' rows of the gradient. The result
does not depend on the number of ranks. Within a step, clients compute one after another, or those
of a stack together over stacked weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Protocol

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.func import vmap
from torch.optim import Optimizer

from lightning_fedssl.algorithm import JointAlgorithm, JointStep
from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.distributed import collectives
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.calls import CallOf
from lightning_fedssl.functional.dictionaries import exclude, map_values
from lightning_fedssl.functional.gradients import clip_gradients
from lightning_fedssl.functional.optimizer_states import like, optimizer_state, set_learning_rate
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.functional.returned import LossError, described, loss_of
from lightning_fedssl.functional.stacked_layers import StackedLayers
from lightning_fedssl.functional.stacked_optimizer import rows_of
from lightning_fedssl.functional.stacking import stack_states
from lightning_fedssl.local_training.ready import Client, prepared
from lightning_fedssl.local_training.sequential import (
    ClientPhase,
    LocalTrainingObserver,
)
from lightning_fedssl.local_training.vectorized import StackedClients
from lightning_fedssl.state import Batch, ClientUpdate, Direction


class JointTrainingObserver(LocalTrainingObserver, Protocol):
    """The events that split learning reports to the loop."""

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """A client and the server exchange tensors of these bytes, by name."""

    def client_judged(self, client: int, reason: str | None) -> None:
        """A client is excluded from the round for this reason, and sends no update."""

    def images_labeled(self, indices: Tensor, pseudo: PseudoLabels) -> None:
        """Images of a client, by their indices in the training data, received pseudo-labels."""


@dataclass(frozen=True, kw_only=True)
class JointPhase(ClientPhase):
    """What the cohort's clients and the server are trained with.

    The working module holds the global model; its server part is trained in place.

    Attributes:
        algorithm: The working module.
        observer: Is called at every start, step, transfer and end.
        server_optimizer: The server's optimizer over the working module's weights, with its initial
            state.
        server_data: The server's data, for the key of its random numbers.
        cohort: All clients of the round, in the order in which the server sees their features.
    """

    algorithm: JointAlgorithm
    observer: JointTrainingObserver
    server_optimizer: Optimizer
    server_data: LocalData
    cohort: Sequence[int]


def train_jointly(phase: JointPhase, stacks: Iterable[Iterable[LocalData]]) -> list[ClientUpdate]:
    """Train the cohort's clients and the server together.

    Args:
        phase: What they are trained with.
        stacks: The data of this rank's clients; those of one stack make their steps together.

    Returns:
        One update for each of this rank's clients that trained.
    """
    algorithm = phase.algorithm
    fabric = phase.fabric
    together = [clients for stack in stacks if (clients := prepared(phase, stack))]
    ready = [*chain.from_iterable(together)]
    client_rows = _ClientRows(fabric, phase.cohort, [client.data.party for client in ready])
    steps = _common_steps(fabric, [client.work.num_steps for client in ready])
    algorithm.train()
    groups = [_Bottoms(phase, stack) for stack in together]
    optimizers = [phase.optimizer, phase.server_optimizer, *(group.optimizer for group in groups)]
    losses = torch.zeros(client_rows.total, dtype=torch.float64, device=fabric.device)
    for step in range(steps):
        for optimizer in optimizers if algorithm.step_factors else ():
            set_learning_rate(optimizer, algorithm.step_factors[step])
        remaining = iter(batches := [client.work.batch(step) for client in ready])
        with fabric.autocast():
            parts = [
                group.features([*islice(remaining, len(group.clients))], step) for group in groups
            ]
        features = client_rows.gather([map_values(Tensor.detach, part) for part in parts])
        sending = client_rows.present
        client_rows.leave_out(features)
        server = None
        gradient = torch.zeros_like(features[STUDENT])
        if client_rows.present:
            sent = {name: client_rows.chosen(t).detach() for name, t in features.items()}
            server, student_gradient = _server_step(phase, sent, step)
            gradient = client_rows.for_all(student_gradient * len(client_rows.present))
            losses += client_rows.for_all(_client_losses(server, len(client_rows.present)))
        _report(phase, ready, batches, features, server, client_rows, sending)
        of_groups = client_rows.local(gradient).split([len(group.clients) for group in groups])
        for group, part, its_gradient in zip(groups, parts, of_groups, strict=True):
            group.step(part[STUDENT], its_gradient)
            if phase.batch_ended:
                for _ in group.clients:
                    phase.batch_ended(step)
    _log_losses(algorithm, ready, client_rows, losses)
    for client in client_rows.left_out:
        phase.observer.client_judged(client, "sent features that are not finite")
    return list(chain.from_iterable(group.updates(client_rows.left_out) for group in groups))


STUDENT = "student"
"""The name of the features that receive a gradient."""


def _common_steps(fabric: Fabric, steps: list[int]) -> int:
    """The number of steps, which is one for all clients of all ranks."""
    numbers = {number for part in collectives.gather(fabric, steps) for number in part}
    if len(numbers) > 1:
        raise ValueError(
            "clients that train together with the server must make equally many steps, not "
            f"{numbers}"
        )
    return numbers.pop() if numbers else 0


def _server_step(phase: JointPhase, features: State, step: int) -> tuple[JointStep, Tensor]:
    """One step of the server's part on the features of all clients, and the gradient of the
    student's features.
    """
    algorithm = phase.algorithm
    phase.server_optimizer.zero_grad(set_to_none=True)
    student = features[STUDENT].requires_grad_()
    with own_random_stream(phase.server_data, "joint network", step):
        with phase.fabric.autocast():
            computed = _checked(algorithm, algorithm.joint_training_step(features, step))
        phase.fabric.backward(computed.loss)
    if algorithm.gradient_clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(algorithm.parameters(), algorithm.gradient_clip_norm)
    phase.server_optimizer.step()
    return computed, torch.zeros_like(student) if student.grad is None else student.grad


def _checked(algorithm: JointAlgorithm, returned: object) -> JointStep:
    """What the server has computed; a method of the user's own may return anything.

    Raises:
        LossError: It is not a :class:`JointStep`, or its loss is not one number.
    """
    if not isinstance(returned, tuple):
        name = f"{type(algorithm).__name__}.joint_training_step"
        raise LossError(
            f"{name} returned {described(returned)}: return "
            "lightning_fedssl.algorithm.JointStep(loss)"
        )
    computed = JointStep(*returned)
    loss_of(computed.loss, algorithm, "joint_training_step", may_skip=False)
    return computed


def _report(
    phase: JointPhase,
    ready: Sequence[Client],
    batches: Sequence[Batch],
    features: State,
    server: JointStep | None,
    client_rows: _ClientRows,
    sending: Sequence[int],
) -> None:
    """Report what each of this rank's clients sent and received,
    and how its images were labelled.

    ``sending`` are the rows of the clients that were not excluded before this step.
    """
    observer = phase.observer
    count = features[STUDENT].shape[1]
    for client, batch, row in zip(ready, batches, client_rows.of_this_rank, strict=True):
        if row not in sending:
            continue
        party = client.data.party
        up, down = phase.algorithm.step_sizes(party, map_values(itemgetter(row), features))
        observer.transfer(party, "up", up)
        if row not in client_rows.present:
            continue
        observer.transfer(party, "down", down)
        if server is not None and server.pseudo is not None and "index" in batch:
            first = count * client_rows.present.index(row)
            images = slice(first, first + count)
            pseudo = PseudoLabels(*map(itemgetter(images), server.pseudo))
            with phase.algorithm.clients.stage(party):
                observer.images_labeled(batch["index"], pseudo)


def _client_losses(server: JointStep, clients: int) -> Tensor:
    """The loss of each client at a step, ``(clients,)``."""
    if server.image_losses is None:
        return server.loss.detach().double().expand(clients)
    return server.image_losses.detach().double().reshape(clients, -1).mean(1)


def _log_losses(
    algorithm: JointAlgorithm,
    ready: Sequence[Client],
    client_rows: _ClientRows,
    losses: Tensor,
) -> None:
    """Log the mean loss of each of this rank's clients over all steps.

    The server rejects those that are left out.
    """
    for client, row in zip(ready, client_rows.of_this_rank, strict=True):
        if row in client_rows.present:
            with algorithm.clients.stage(client.data.party):
                steps = client.work.num_steps
                images = steps * client.data.batch_size
                algorithm.log("client/loss", losses[row] / steps, batch_size=images)


class _ClientRows:
    """The rows of the clients in the server's batch, over all ranks.

    Args:
        fabric: The ranks.
        cohort: The clients in order.
        of_this_rank: This rank's clients that train.
    """

    def __init__(self, fabric: Fabric, cohort: Sequence[int], of_this_rank: Sequence[int]) -> None:
        self.fabric = fabric
        self.by_rank: list[list[int]] = collectives.gather(fabric, list(of_this_rank))
        gathered = [*chain.from_iterable(self.by_rank)]
        self.total = len(gathered)
        self._clients = [client for client in cohort if client in gathered]
        self.of_this_rank = list(map(self._clients.index, of_this_rank))
        order = list(map(gathered.index, self._clients))
        self._order = torch.tensor(order, dtype=torch.int64, device=fabric.device)
        self._of_this_rank = torch.tensor(
            self.of_this_rank, dtype=torch.int64, device=fabric.device
        )
        self.present = list(range(self.total))

    @property
    def left_out(self) -> list[int]:
        """This rank's clients that are excluded from the round."""
        return [self._clients[row] for row in self.of_this_rank if row not in self.present]

    def leave_out(self, features: State) -> None:
        """Exclude clients whose features are not finite, from this step on.

        Every rank has the same features.
        """
        sums = torch.stack([t.flatten(1).sum(1).double() for t in features.values()])
        finite = sums.sum(0).isfinite().tolist()
        self.present = [row for row in self.present if finite[row]]

    def chosen(self, rows: Tensor) -> Tensor:
        """The rows of the clients that are not excluded."""
        return rows if len(self.present) == self.total else rows[self.present]

    def for_all(self, rows: Tensor) -> Tensor:
        """Rows of the clients that are not excluded, with rows of zeros for the others."""
        if len(self.present) == self.total:
            return rows
        of_all = rows.new_zeros(self.total, *rows.shape[1:])
        of_all[self.present] = rows
        return of_all

    def gather(self, parts: Sequence[State]) -> State:
        """The features of all clients, ``(clients, batch, ...)``, in the cohort's order.

        Args:
            parts: This rank's features, in parts.
        """
        joined = (
            {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
        )
        if self.fabric.world_size > 1:
            joined = collectives.gather_rows(self.fabric, joined, list(map(len, self.by_rank)))
        return map_values(itemgetter(self._order), joined)

    def local(self, rows: Tensor) -> Tensor:
        """This rank's rows out of those of all clients."""
        return rows[self._of_this_rank]


class _Bottoms(StackedClients):
    """The clients' parts of the network, for one client or for several over stacked weights.

    Args:
        phase: What they are trained with; the algorithm gives the features.
        clients: The clients, which all make the same number of steps.
    """

    def __init__(self, phase: JointPhase, clients: Sequence[Client]) -> None:
        super().__init__(phase, clients, is_own=phase.algorithm.at_clients)
        self.call = CallOf(phase.algorithm, "client_features").of_client
        self.leaves = {name: self.tensors[name].requires_grad_() for name in self.order}
        self.rest = exclude(self.tensors, self.leaves)
        self.optimizer = like(self.template, [*self.leaves.values()], self.optimizer_state)

    def features(self, batches: Sequence[Batch], step: int) -> State:
        """The features that the clients send, ``(clients, batch, ...)`` each."""
        with own_random_stream(self.clients[0].data, "joint network", step):
            if len(self.clients) == 1:
                leaves = map_values(itemgetter(0), self.leaves)
                rest = map_values(itemgetter(0), self.rest)
                outputs = self.call(leaves, rest, batches[0], step)
                features, replaced = (map_values(itemgetter(None), part) for part in outputs)
            else:
                together = vmap(self.call, randomness="different", in_dims=(0, 0, 0, None))
                with StackedLayers():
                    features, replaced = together(
                        self.leaves, self.rest, stack_states(batches), step
                    )
        for name, new in replaced.items():
            self.rest[name].copy_(new.detach())
        return features

    def step(self, features: Tensor, gradient: Tensor) -> None:
        """Backpropagate from the gradient of each client's features, and update its weights."""
        self.optimizer.zero_grad()
        self.phase.fabric.backward(features, gradient.to(features.dtype))
        if (max_norm := self.phase.algorithm.gradient_clip_norm) is not None:
            clip_gradients(self.leaves.values(), max_norm)
        self.optimizer.step()

    def updates(self, left_out: Sequence[int]) -> Iterator[ClientUpdate]:
        """The updates of the clients, except those that were excluded."""
        for row, client in enumerate(self.clients):
            if client.data.party not in left_out:
                tensors = map_values(itemgetter(row), self.tensors)
                update = self.phase.update(tensors, client.data, client.work)
                state = rows_of(optimizer_state(self.optimizer), row)
                yield self.phase.finish(client.data, update, state.copy)
