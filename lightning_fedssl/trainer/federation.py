"""The clients and the server of the present round, as one process simulates them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State, sizes_of
from lightning_fedssl.functional.batch_norm import (
    LayerMoments,
    local_moments,
    measuring_batches,
)
from lightning_fedssl.functional.by_name import mapped, places, taken, tensors_of
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_training import sequential
from lightning_fedssl.local_training.sequential import ClientPhase
from lightning_fedssl.local_training.split_learning import JointPhase
from lightning_fedssl.local_training.step_work import step_work
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.round import Federation
from lightning_fedssl.run import Run
from lightning_fedssl.state import ClientUpdate, Direction, load_optimizer_state, load_state
from lightning_fedssl.system import Outcome
from lightning_fedssl.updates.acceptance import check_update
from lightning_fedssl.updates.rule import Arrival, UpdateRule

_log = logging.getLogger(__name__)


class SimulatedFederation(Federation):
    """The clients and the server of a run in one process, or in its ranks.

    It is also the observer of the local trainers: it counts what they report and calls the hooks of
    the callbacks.

    Args:
        trainer: The trainer.

    Attributes:
        client_seconds: Seconds in which this rank trained the clients of the last round that
            trained any.
        participation: Who takes part in the round.
        trained: What clients of this rank did in the round: False if one had batches to train on,
            and True if one has made a step.
    """

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        self.client_seconds = 0.0
        self.participation = Participation(trainer)
        self.trained: set[bool] = set()
        self._client_sizes: list[int] = trainer.datamodule.statistics.sizes.tolist()
        self._server_phases = 0
        self._step_work: dict[Any, float] = {}
        self._received: dict[int, State] = {}
        self._own: set[int] = set()
        self._rules = [rule for rule in trainer.callbacks if isinstance(rule, UpdateRule)]

    def start_round(self) -> None:
        """Begin a round: the next server phase is its first.

        Before the first one, sites send what they state of their classes.
        """
        self._server_phases = 0
        self._step_work.clear()
        self.trained = set()
        if self.trainer.round_index == 1 and self.trainer.is_global_zero:
            for client, stated in self.trainer.datamodule.shares.items():
                self.transfer(client, "up", {"class shares": 8 * len(stated.shares)})

    def end_round(self) -> None:
        """End a round, when the global model is final: nothing to do in a simulation."""

    # What an algorithm may ask for.

    @property
    def server_optimizer(self) -> Optimizer:
        """See :meth:`Federation.server_optimizer`."""
        return self.trainer.server_optimizer

    def reached(self, clients: Sequence[int]) -> Sequence[int]:
        """See :meth:`Federation.reached`."""
        return clients

    def moments(
        self, parties: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, LayerMoments]]:
        """See :meth:`Federation.moments`."""
        for party in parties:
            data = self.trainer.local_data(party)
            yield party, measure_moments(self.trainer.algorithm, data, batch_size)

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`Federation.validation_batches`."""
        return iter(self.trainer.datamodule.evaluation_batches("validate", self.trainer.dtype))

    def train_server(self) -> None:
        """See :meth:`Federation.train_server`."""
        trainer = self.trainer
        algorithm = self.trainer.algorithm
        optimizer = self.trainer.server_optimizer
        load_state(algorithm, algorithm.server.model())
        trainer.call("on_server_phase_start")
        # A second server phase in a round uses the random numbers of the next round, not those of
        # the first phase again.
        data = trainer.datamodule.local_data(
            sampling.SERVER, trainer.round_index + self._server_phases, trainer.dtype
        )
        self._server_phases += 1
        work = algorithm.on_server_start(data).limited(trainer.max_steps)
        if trainer.is_global_zero:  # every rank takes the same steps
            trainer.scalars.count("server/steps", float(work.num_steps))
        if work.num_steps:
            if not algorithm.keep_server_optimizer:
                load_optimizer_state(optimizer, {})
            with sequential.own_random_stream(data):
                sequential.Loop(algorithm, optimizer, trainer.fabric).train(
                    work, algorithm.server_training_step, "server/loss",
                    lambda step: trainer.call("on_server_batch_end", step),
                )  # fmt: skip
            self._take_working_module()
        trainer.call("on_server_phase_end")

    def train_clients(self) -> Iterator[ClientUpdate]:
        """See :meth:`Federation.train_clients`."""
        trainer = self.trainer
        trainer.call("on_client_phase_start")
        phase = ClientPhase(
            trainer.algorithm, trainer.client_optimizer, trainer.fabric, self, trainer.max_steps
        )
        stacks = self._share(self.start_clients())
        return self.accepted(trainer.local_training.train_clients(phase, stacks))

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """See :meth:`Federation.train_jointly`."""
        trainer = self.trainer
        algorithm = self.trainer.algorithm
        if not isinstance(algorithm, JointAlgorithm):
            raise TypeError(
                f"{type(algorithm).__name__} must be a JointAlgorithm to train clients and server "
                "together"
            )
        trainer.call("on_client_phase_start")
        load_state(algorithm, algorithm.server.model())
        if not algorithm.keep_server_optimizer:
            load_optimizer_state(trainer.server_optimizer, {})
        stacks = self._share(self.start_clients())
        phase = JointPhase(
            algorithm=algorithm,
            optimizer=trainer.client_optimizer,
            fabric=trainer.fabric,
            observer=self,
            max_steps=trainer.max_steps,
            server_optimizer=trainer.server_optimizer,
            server_data=trainer.local_data(sampling.SERVER),
            cohort=trainer.cohort,
        )
        updates = trainer.local_training.train_jointly(phase, stacks)
        self._take_working_module(lambda name: not algorithm.at_clients(name))
        return self.accepted(iter(updates))

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """See :meth:`Federation.transfer`."""
        self.trainer.transfer(client, direction, sizes)

    # The loop over the clients of a round.

    def start_clients(self) -> list[int]:
        """Begin a phase of client training; returns the clients of all ranks that do not drop out.

        A client that drops out receives its broadcast and nothing else happens: its persistent
        state stays as it is.
        """
        algorithm = self.trainer.algorithm
        fabric = self.trainer.fabric
        algorithm.clients.watch_changes()
        self._received.clear()
        self._own.clear()
        absent = self.participation.start(self.trainer.cohort)
        for client in absent[fabric.global_rank :: fabric.world_size]:
            with algorithm.clients.stage(client):
                sizes = algorithm.download_sizes(client, algorithm.broadcast(client))
                self.transfer(client, "down", sizes)
            algorithm.clients.discard(client)
        return self.participation.present

    def accepted(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The updates of all ranks that enter the new model, in the order of the cohort.

        This is the one place that all updates pass: the rules of ``trainer.updates`` are applied
        here. With a rule that combines them, it is one update.

        Args:
            updates: Those of this rank's clients; taking one trains its client.
        """
        accepted = self._judged(updates)
        for rule in self._rules:
            accepted = rule.combine(self.trainer, self.trainer.algorithm, accepted)
        return accepted

    def _judged(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Those of all ranks that the server accepts.

        An update is judged as soon as it is there. It waits, as a copy on the CPU, if other ranks
        train, or if a rule holds it.
        """
        trainer = self.trainer
        started = time.perf_counter()
        waits = trainer.world_size > 1
        passed = []
        waiting = list[Arrival]()
        for update in updates:
            received = self._received.pop(update.client, {})
            arrival = self._checked(Arrival(update), received)
            held = arrival.reason is None and any(rule.holds(arrival) for rule in self._rules)
            if waits or waiting or held:
                waiting.append(arrival.copied())
            else:
                self.client_judged(update.client, arrival.reason)
                if arrival.reason is None:
                    passed.append(arrival.notes)
                    yield arrival.update
        self.client_seconds = time.perf_counter() - started
        load_state(trainer.algorithm, trainer.algorithm.server.personal)
        for arrival in self._compared(self._exchange(waiting), passed):
            self.client_judged(arrival.update.client, arrival.reason)
            if arrival.reason is None:
                yield arrival.update.to(trainer.fabric.device)
        trainer.call("on_aggregate")

    def _checked(self, arrival: Arrival, received: State) -> Arrival:
        """What single updates are rejected for, and what rules make of them.

        Args:
            arrival: The update as it was sent.
            received: What its client received; a tensor that it lacks is the server's.
        """
        trainer = self.trainer
        algorithm = self.trainer.algorithm
        if reason := check_update(algorithm, arrival.update):
            return arrival.rejected(reason)
        received = {**algorithm.server.model(), **received}  # a client may get a model of its own
        for rule in self._rules:
            before = arrival.update
            if arrival.reason is None:
                arrival = rule.on_update(trainer, algorithm, arrival, received)
            if arrival.update is not before and (reason := check_update(algorithm, arrival.update)):
                return arrival.rejected(reason)
        return arrival

    def _compared(
        self, arrivals: list[Arrival], passed: Sequence[Mapping[str, Any]]
    ) -> list[Arrival]:
        """The arrivals of a round as rules judge them that look at all; the same on every rank."""
        for rule in self._rules:
            valid = [arrival for arrival in arrivals if arrival.reason is None]
            judged = rule.on_round(self.trainer, self.trainer.algorithm, valid, passed)
            found = {arrival.update.client: arrival for arrival in judged}
            arrivals = [found.get(arrival.update.client, arrival) for arrival in arrivals]
        return arrivals

    def _share(self, present: list[int]) -> list[list[LocalData]]:
        """The data of the clients that this rank trains, in stacks."""
        trainer = self.trainer
        fabric = self.trainer.fabric
        stacks = trainer.local_training.stacks(present, fabric.device)
        shares = sampling.share_out(stacks, self._client_sizes, fabric.world_size)
        return [list(map(self._data_of, stack)) for stack in shares[fabric.global_rank]]

    def _data_of(self, client: int) -> LocalData:
        """The data of a client as it trains on them: an attacker may have changed its own."""
        data = self.trainer.local_data(client)
        for rule in self._rules:
            data = rule.on_data(self.trainer, data)
        return data

    def _exchange(self, own: list[Arrival]) -> list[Arrival]:
        """The arrivals of all ranks, in the order of the cohort.

        The other ranks' client states are stored here, too.

        Any rank may train any client next, so every rank has the state of all clients.
        """
        if self.trainer.world_size == 1:
            return own
        clients = self.trainer.algorithm.clients
        rank = self.trainer.global_rank
        staged = {arrival.update.client: clients.staged(arrival.update.client) for arrival in own}
        outcomes = self.participation.outcomes
        reasons = self.participation.reasons
        parts = self.trainer.gather((own, staged, clients.changes(), outcomes, reasons))
        for _, of_clients, changes, of_rank, why in parts[:rank] + parts[rank + 1 :]:
            for client, states in of_clients.items():
                clients.add_staged(client, states)
            clients.apply(changes)
            outcomes |= of_rank
            reasons |= why
        place = places(self.trainer.cohort)
        everyone = chain.from_iterable(arrivals for arrivals, *_ in parts)
        return sorted(everyone, key=lambda arrival: place[arrival.update.client])

    def client_judged(self, client: int, reason: str | None) -> None:
        """A client's update is accepted (no reason) or rejected.

        Its state and its metrics count only if accepted.
        """
        trainer = self.trainer
        clients = self.trainer.algorithm.clients
        is_own = trainer.world_size == 1 or client in self._own
        if reason is None:
            self.participation.outcomes[client] = "finished"
            clients.commit(client)
            trainer.scalars.accept(client)
        else:
            self.participation.outcomes[client] = "rejected"
            self.participation.reasons[client] = reason
            clients.discard(client)
            trainer.scalars.reject(client)
            if is_own:
                trainer.scalars.count("client/refused", 1)
        if is_own:
            trainer.call("on_client_judged", client, reason is None)

    # What the local trainers report.

    def client_started(
        self, data: LocalData, work: LocalWork, sizes: Sizes, received: State
    ) -> None:
        """A client has received its broadcast, of these bytes by name, and prepared its work."""
        trainer = self.trainer
        if trainer.datamodule.label_location == "server":  # which trains what clients start with
            new = not trainer.algorithm.clients.get(data.party, "personal")
            sizes = sizes | (sizes_of(trainer.algorithm.server.personal) if new else {})
        self.transfer(data.party, "down", sizes)
        self._own.add(data.party)
        if work.num_steps:
            self.trained.add(False)
            self._received[data.party] = received
            if trainer.system is not None:
                trainer.step_work[data.party] = step_work(
                    trainer.algorithm, data, work, trainer.fabric, self._step_work
                )
        images = work.num_samples if work.num_steps else 0
        counts = {"trained": work.num_steps > 0, "images": images, "steps": work.num_steps}
        for name, number in counts.items():
            trainer.scalars.count(f"client/{name}", float(number))
        trainer.call("on_client_start", data, work)
        if not work.num_steps:
            self.participation.outcomes[data.party] = "skipped"
            trainer.scalars.accept(data.party)

    def images_labeled(self, indices: Tensor, pseudo: PseudoLabels) -> None:
        """Images of a client received pseudo-labels at a step.

        ``indices`` are their numbers in the training data.
        """
        self.trainer.call("on_pseudo_labels", indices, pseudo)

    def client_batch_ended(self, step: int) -> None:
        """A client has made a step."""
        self.trained.add(True)
        self.trainer.call("on_client_batch_end", step)

    def client_ended(self, update: ClientUpdate) -> None:
        """A client has finished."""
        sizes = self.trainer.algorithm.upload_sizes(update)
        for rule in self._rules:
            sizes = rule.upload_sizes(update, sizes)
        self.transfer(update.client, "up", sizes)
        self.trainer.call("on_client_end", update)

    def _take_working_module(self, which: Callable[[str], bool] = lambda name: True) -> None:
        """Make the weights and buffers of the working module, or some of them, those of the global
        model.
        """
        server = self.trainer.algorithm.server
        tensors = tensors_of(self.trainer.algorithm)
        trained = mapped(Tensor.detach, taken(tensors, filter(which, tensors)))
        server.update(
            taken(trained, server.parameters),
            taken(trained, server.buffers),
            taken(trained, server.personal),
        )


def measure_moments(
    algorithm: FederatedAlgorithm, data: LocalData, batch_size: int
) -> LayerMoments:
    """The batch-norm moments of all images of a party by layer.

    A party with fewer than two images has none.

    Args:
        algorithm: The working module.
        data: The party's data.
        batch_size: Images per batch of the measurement.
    """
    indices = torch.cat([data.labeled, data.unlabeled])
    batches = measuring_batches(indices, batch_size)
    with sequential.own_random_stream(data, "batch-norm moments"):
        return local_moments(algorithm, map(data.plain, batches)) if len(indices) > 1 else {}


_PHRASES: dict[Outcome, str] = {
    "dropped": "dropped out", "rejected": "rejected", "skipped": "without work",
}  # fmt: skip


class Participation:
    """Records the outcome of every selected client of a round.

    With several ranks, each has the outcomes of all.

    Args:
        trainer: The trainer.

    Attributes:
        outcomes: What became of the clients of the round so far.
        reasons: Why updates were rejected.
        present: The clients of the round, on all ranks, that do not drop out.
    """

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        self.outcomes: dict[int, Outcome] = {}
        self.reasons: dict[int, str] = {}
        self.present: list[int] = []

    def start(self, cohort: Sequence[int]) -> list[int]:
        """Begin a phase of client training; returns the clients that drop out."""
        absent = [client for client in cohort if self.trainer.drops_out(client)]
        self.outcomes |= dict.fromkeys(absent, "dropped")
        self.present = [client for client in cohort if client not in absent]
        return absent

    def end_round(self) -> None:
        """Log the outcomes of all ranks' clients, and publish them as ``trainer.participation``."""
        trainer = self.trainer
        outcomes = self.outcomes
        trainer.took_part(taken(outcomes, trainer.cohort))
        for client, reason in sorted(self.reasons.items()):
            _log.warning(
                "round %d: client %d %s; it is left out of the average",
                trainer.round_index,
                client,
                reason,
            )
        if trainer.faults.availability is not None and outcomes:
            found = list(outcomes.values())
            if trainer.is_global_zero:
                trainer.scalars.count("client/selected", len(found))
                for name in ("finished", "dropped"):
                    trainer.scalars.count(f"client/{name}", found.count(name))
            if "finished" not in found:
                _log.warning(
                    "round %d: none of the %d selected clients took part (%s): no update is "
                    "averaged in this round",
                    trainer.round_index, len(found), described(found),
                )  # fmt: skip
        self.outcomes = {}
        self.reasons = {}


def described(outcomes: Iterable[Outcome]) -> str:
    """The clients that did not take part by reason: ``2 dropped out, 1 rejected``.

    Args:
        outcomes: Of all selected clients of a round.
    """
    found = list(outcomes)
    return ", ".join(
        f"{found.count(name)} {phrase}" for name, phrase in _PHRASES.items() if name in found
    )
