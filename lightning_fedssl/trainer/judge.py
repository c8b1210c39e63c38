"""Judges the updates of a round: what single updates are checked for, the rules of
``trainer.updates``, and what follows for the clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain

from lightning.fabric import Fabric

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.functional.averaging import Sizes, State
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.metrics.rounds import Scalars
from lightning_fedssl.state import ClientUpdate, load_state
from lightning_fedssl.system import Outcome
from lightning_fedssl.updates.acceptance import check_update
from lightning_fedssl.updates.arrivals import Rules
from lightning_fedssl.updates.rule import Arrival

_log = logging.getLogger(__name__)

_PHRASES: dict[Outcome, str] = {
    "dropped": "dropped out", "rejected": "rejected", "skipped": "without work",
}  # fmt: skip


class Judge:
    """Judges the updates of the clients, in a simulation and in a deployment.

    An accepted update enters the new model, and with it the client's state and what it has logged;
    a rejected one leaves nothing.

    Args:
        algorithm: The method, whose clients' states are kept or dropped.
        fabric: The ranks.
        hooks: The callbacks, which are told of each judgement.
        scalars: What clients have logged.

    Attributes:
        rules: The rules of ``trainer.updates``.
        outcomes: What became of the clients of the last phase so far; with several ranks each has
            those of all once the updates are exchanged.
        received: By client, the broadcast that it has trained from, until its update is judged.
        client_seconds: Seconds that this rank took to train its clients, in the last round in which
            clients were trained.
    """

    def __init__(
        self, algorithm: FederatedAlgorithm, fabric: Fabric, hooks: Hooks, scalars: Scalars
    ) -> None:
        self.algorithm = algorithm
        self.fabric = fabric
        self.hooks = hooks
        self.scalars = scalars
        self.rules = Rules(hooks.trainer)
        self.outcomes: dict[int, Outcome] = {}
        self.received: dict[int, State] = {}
        self.client_seconds = 0.0
        self._reasons: dict[int, str] = {}
        self._own: set[int] = set()

    def start_clients(self, absent: Sequence[int]) -> None:
        """Begin a phase of client training.

        Args:
            absent: The clients of all ranks that drop out.
        """
        self.algorithm.clients.staged.clear()
        self.received.clear()
        self._own.clear()
        self.outcomes = dict.fromkeys(absent, "dropped")

    def started(self, client: int, received: State) -> None:
        """A client of this rank has received its broadcast."""
        self._own.add(client)
        self.received[client] = received

    def skipped(self, client: int) -> None:
        """A client of this rank does nothing in this round: there is no update to accept."""
        self.outcomes[client] = "skipped"
        self.scalars.accept(client)
        if self.fabric.world_size == 1:  # several ranks exchange what it has staged
            self.algorithm.clients.commit(client)

    def on_data(self, data: LocalData) -> LocalData:
        """The data of a client as it trains on them: an attacker may have changed its own."""
        for rule in self.rules:
            data = rule.on_data(self.hooks.trainer, data)
        return data

    def upload_sizes(self, update: ClientUpdate) -> Sizes:
        """Bytes by name that a client uploads, by the method and the rules."""
        sizes = self.algorithm.upload_sizes(update)
        for rule in self.rules:
            sizes = rule.upload_sizes(update, sizes)
        return sizes

    def accepted(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The updates of all ranks that enter the new model, in the order of the cohort.

        This is the one place that all updates pass: the rules of ``trainer.updates`` are applied
        here. With a rule that combines them, it is one update.

        Args:
            updates: Those of this rank's clients; taking one trains its client.
        """
        return self.rules.combined(self.judged(updates))

    def judged(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The updates of all ranks that the server accepts, in the order of the cohort.

        An update is judged as soon as it is there. It waits, as a copy on the CPU, if other ranks
        train, or if a rule holds it.
        """
        algorithm = self.algorithm
        started = time.perf_counter()
        waits = self.fabric.world_size > 1
        accepted = []
        waiting = list[Arrival]()
        for update in updates:
            received = self.received.pop(update.client, {})
            arrival = self.rules.alone(Arrival(update), received, check_update)
            must_wait = arrival.reason is None and any(
                rule.must_wait(arrival) for rule in self.rules
            )
            if waits or waiting or must_wait:
                waiting.append(arrival.copied())
            else:
                self.settle(update.client, arrival.reason)
                if arrival.reason is None:
                    accepted.append(arrival.notes)
                    yield arrival.update
        self.client_seconds = time.perf_counter() - started
        load_state(algorithm, algorithm.server.personal)
        for arrival in self.rules.together(self._exchange(waiting), accepted):
            self.settle(arrival.update.client, arrival.reason)
            if arrival.reason is None:
                yield arrival.update.to(self.fabric.device)
        self.hooks.call("on_aggregate")

    def _exchange(self, of_this_rank: list[Arrival]) -> list[Arrival]:
        """The arrivals of all ranks, in the order of the cohort.

        The other ranks' client states are stored here, too.

        Any rank may train any client next, so every rank has the state of all clients.
        """
        if self.fabric.world_size == 1:
            return of_this_rank
        clients = self.algorithm.clients
        rank = self.fabric.global_rank
        part = (of_this_rank, clients.staged, self.outcomes, self._reasons)
        parts = collectives.gather(self.fabric, part)
        for _, staged, of_rank, why in parts[:rank] + parts[rank + 1 :]:
            clients.staged |= staged
            self.outcomes |= of_rank
            self._reasons |= why
        for client, outcome in self.outcomes.items():
            if outcome == "skipped":
                clients.commit(client)
        place = {client: i for i, client in enumerate(self.algorithm.current_round.cohort)}
        arrivals_of_all = chain.from_iterable(arrivals for arrivals, *_ in parts)
        return sorted(arrivals_of_all, key=lambda arrival: place[arrival.update.client])

    def settle(self, client: int, reason: str | None) -> None:
        """A client's update is accepted (no reason) or rejected.

        Its state and its metrics count only if accepted.
        """
        is_own = self.fabric.world_size == 1 or client in self._own
        if reason is None:
            self.outcomes[client] = "finished"
            self.algorithm.clients.commit(client)
            self.scalars.accept(client)
        else:
            self.outcomes[client] = "rejected"
            self._reasons[client] = reason
            self.algorithm.clients.discard(client)
            self.scalars.reject(client)
            if is_own:
                self.scalars.count({"client/refused": 1})
        if is_own:
            self.hooks.call("on_client_judged", client, reason is None)

    def end_round(self, counts: bool) -> dict[int, Outcome]:
        """Log the outcomes of all ranks' clients, and return them in drawn order.

        Args:
            counts: Whether the scalars of the round have the numbers of selected, finished and
                dropped clients.
        """
        index = self.algorithm.current_round.index
        cohort = self.algorithm.current_round.cohort
        outcomes = {client: self.outcomes[client] for client in cohort if client in self.outcomes}
        for client, reason in sorted(self._reasons.items()):
            _log.warning(
                "round %d: client %d %s; it is left out of the average",
                index, client, reason,
            )  # fmt: skip
        if counts and outcomes:
            results = list(outcomes.values())
            if self.fabric.is_global_zero:
                self.scalars.count(
                    {
                        "client/selected": len(results),
                        "client/finished": results.count("finished"),
                        "client/dropped": results.count("dropped"),
                    }
                )
            if "finished" not in results:
                _log.warning(
                    "round %d: none of the %d selected clients took part (%s): no update is "
                    "averaged in this round",
                    index,
                    len(results),
                    ", ".join(
                        f"{results.count(kind)} {phrase}"
                        for kind, phrase in _PHRASES.items()
                        if kind in results
                    ),
                )
        self.outcomes = {}
        self._reasons = {}
        return outcomes
