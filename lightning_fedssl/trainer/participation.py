"""Which selected clients take part in a round: who drops out, whose update arrives in time, and what became of each."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from lightning_fedssl.federation import Direction
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.system import Outcome, Usage
from lightning_fedssl.trainer.run import Run

_log = logging.getLogger(__name__)

Share = tuple[dict[int, Outcome], dict[int, str]]
"""Outcomes of clients, and why updates were rejected, by client."""

_PHRASES: dict[Outcome, str] = {
    "dropped": "dropped out", "late": "late", "rejected": "rejected", "skipped": "without work",
}  # fmt: skip


class Participation:
    """Records what became of every selected client of a round, and leaves out those that drop out or are late.

    Args:
        run: The run.

    Attributes:
        outcomes: What became of this rank's clients, since the last :meth:`publish`.
        reasons: Why updates of this rank's clients were rejected, likewise.
        present: The clients of the round, on all ranks, that do not drop out.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.outcomes: dict[int, Outcome] = {}
        self.reasons: dict[int, str] = {}
        self._of_all: Share = ({}, {})
        self._usages: dict[int, Usage] = defaultdict(Usage)
        self.present: list[int] = []

    def start(self, cohort: Sequence[int]) -> list[int]:
        """Begin a phase of client training; returns the clients that do not drop out, on every rank all of them."""
        self._usages.clear()
        self.present = [client for client in cohort if not self.run.drops_out(client)]
        return self.present

    def count_transfer(self, client: int, direction: Direction, size: int) -> None:
        """Count bytes that a client has received or sent since the broadcast."""
        self._usages[client] += Usage(down=size) if direction == "down" else Usage(up=size)

    def count_steps(self, update: ClientUpdate) -> None:
        """Count the steps that a client has made."""
        self._usages[update.client] += Usage(steps=update.num_steps)

    def in_time(self, updates: Iterable[ClientUpdate]) -> Iterator[ClientUpdate]:
        """The updates that the server receives before the deadline, and before it has as many as it needs.

        With more clients than the server needs, nothing is known before all have trained: updates then wait as copies
        on the CPU. Clients that take equally long are taken in the drawn order. Every rank must exhaust the iterator.

        Args:
            updates: Of this rank's clients, each valid until the next is taken.
        """
        reporting, waiting = self.run.reporting, list[tuple[float, int, ClientUpdate]]()
        surplus = reporting.needed is not None and len(self.present) > reporting.needed
        for update in updates:
            seconds = self._seconds(update.client) if reporting.has_late_clients else 0.0
            if reporting.deadline_s is not None and seconds > reporting.deadline_s:
                self._leave_out(update.client, "late")
            elif surplus:
                place = self.present.index(update.client)
                waiting.append((seconds, place, update.to(torch.device("cpu"), copy=True)))
            else:
                yield update
        if surplus:
            yield from self._first(waiting)

    def judged(self, client: int, reason: str | None) -> None:
        """A client's update is accepted (no reason) or rejected; its state and its metrics count only if accepted."""
        if reason is not None:
            self.reasons[client] = reason
            self._leave_out(client, "rejected")
            return
        self.outcomes[client] = "finished"
        self.run.algorithm.clients.commit(client)
        self.run.collector.commit(client)
        self.run.call("on_client_judged", client, True)

    def own(self) -> Share:
        """What the other ranks must know: outcomes of this rank's clients, and why updates were rejected."""
        return self.outcomes, self.reasons

    def publish(self, shares: Iterable[Share]) -> None:
        """Add what all ranks have recorded to the round."""
        for outcomes, reasons in shares:
            self._of_all[0].update(outcomes)
            self._of_all[1].update(reasons)
        self.outcomes, self.reasons = {}, {}

    def end_round(self) -> None:
        """Log the outcomes of all ranks' clients, and publish them as ``status.participation``."""
        run = self.run
        names: tuple[Outcome, ...] = ("finished", "dropped", "late")
        self.publish([self.own()])  # a deployment has one rank, and exchanges nothing
        (outcomes, reasons), self._of_all = self._of_all, ({}, {})
        run.status.participation = {client: outcomes[client] for client in run.status.cohort if client in outcomes}
        self._log_rejected(reasons)
        if run.reporting.loses_clients and outcomes:
            if run.fabric.is_global_zero:
                run.counter.add("client/selected", len(outcomes))
                for name in names:
                    run.counter.add(f"client/{name}", list(outcomes.values()).count(name))
            if "finished" not in outcomes.values():
                _log.warning(
                    "round %d: none of the %d selected clients took part (%s): no update is averaged in this round",
                    run.status.round_index, len(outcomes), described(outcomes.values()),
                )  # fmt: skip

    def _log_rejected(self, reasons: Mapping[int, str]) -> None:
        """Log why updates of this round were rejected."""
        run = self.run
        for client, reason in sorted(reasons.items()):
            _log.warning(
                "round %d: client %d %s; it is left out of the average", run.status.round_index, client, reason
            )  # fmt: skip

    def _first(self, waiting: Sequence[tuple[float, int, ClientUpdate]]) -> Iterator[ClientUpdate]:
        """Of all ranks' updates the ``needed`` ones that arrive first; this rank's of them."""
        everyone = sorted(key for part in self.run.gather([key for *key, _ in waiting]) for key in part)
        last = everyone[: self.run.reporting.needed][-1:]
        for *key, update in waiting:
            if [key] <= last:
                yield update.to(self.run.fabric.device)
            else:
                self._leave_out(update.client, "late")

    def _seconds(self, client: int) -> float:
        """The simulated time of a client from the broadcast to the end of its upload."""
        run, system = self.run, self.run.reporting.system
        if system is None:
            return 0.0
        usage, batch_size = self._usages[client], run.datamodule.client_batch_size
        return system.client_duration(run.seed, run.status.round_index, client, usage, batch_size).total

    def _leave_out(self, client: int, outcome: Outcome) -> None:
        self.outcomes[client] = outcome
        self.run.algorithm.clients.discard(client)
        self.run.collector.discard(client)
        self.run.call("on_client_judged", client, False)


def described(outcomes: Iterable[Outcome]) -> str:
    """The clients that did not take part by reason: ``2 dropped out, 1 late``.

    Args:
        outcomes: Of all selected clients of a round.
    """
    found = list(outcomes)
    return ", ".join(f"{found.count(name)} {phrase}" for name, phrase in _PHRASES.items() if name in found)
