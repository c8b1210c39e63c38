"""What became of every selected client of a round: who dropped out, whose update arrived in time,
who was rejected.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from lightning_fedssl.run import Run
from lightning_fedssl.state import ClientUpdate, Direction
from lightning_fedssl.system import Outcome, Usage
from lightning_fedssl.updates.rule import Arrival

_log = logging.getLogger(__name__)

_PHRASES: dict[Outcome, str] = {
    "dropped": "dropped out", "late": "late", "rejected": "rejected", "skipped": "without work",
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
        self._usages: dict[int, Usage] = defaultdict(Usage)
        self._deadline_s = trainer.faults.deadline_s
        self._over_selects = trainer.faults.over_selection > 0
        self._may_be_late = trainer.faults.has_late_clients and trainer.system is not None

    def start(self, cohort: Sequence[int]) -> list[int]:
        """Begin a phase of client training; returns the clients that drop out."""
        self._usages.clear()
        absent = [client for client in cohort if self.trainer.drops_out(client)]
        self.outcomes |= dict.fromkeys(absent, "dropped")
        self.present = [client for client in cohort if client not in absent]
        return absent

    def count_transfer(self, client: int, direction: Direction, size: int) -> None:
        """Count bytes that a client has received or sent since the broadcast."""
        if self._may_be_late:
            self._usages[client] += Usage(down=size) if direction == "down" else Usage(up=size)

    def count_steps(self, update: ClientUpdate) -> None:
        """Count what a client has computed."""
        if self._may_be_late:
            self._usages[update.client] += Usage(
                work=update.num_steps * self.trainer.step_work[update.client]
            )

    def seconds(self, client: int) -> float:
        """The simulated time of a client from the broadcast to the end of its upload.

        0 where nobody can be late.
        """
        trainer, system = self.trainer, self.trainer.system
        if system is None or not self._may_be_late:
            return 0.0
        usage, batch_size = self._usages[client], trainer.datamodule.client_batch_size
        return system.client_duration(
            trainer.seed, trainer.round_index, client, usage, batch_size
        ).total

    def is_late(self, arrival: Arrival) -> bool:
        """Whether an update came after the deadline."""
        return self._deadline_s is not None and arrival.seconds > self._deadline_s

    @property
    def has_surplus(self) -> bool:
        """Whether more clients train than the server needs, so that it uses those that finish
        first.
        """
        return self._over_selects and len(self.present) > self.trainer.clients_per_round

    def not_needed(self, arrivals: Sequence[Arrival]) -> set[int]:
        """The clients whose updates come when the server has enough.

        Equally fast ones count in the drawn order.
        """
        if not self.has_surplus:
            return set()
        fastest = sorted(arrivals, key=lambda a: (a.seconds, self.present.index(a.update.client)))
        return {arrival.update.client for arrival in fastest[self.trainer.clients_per_round :]}

    def end_round(self) -> None:
        """Log the outcomes of all ranks' clients, and publish them as ``trainer.participation``."""
        trainer, outcomes = self.trainer, self.outcomes
        trainer.took_part({c: outcomes[c] for c in trainer.cohort if c in outcomes})
        for client, reason in sorted(self.reasons.items()):
            _log.warning(
                "round %d: client %d %s; it is left out of the average",
                trainer.round_index,
                client,
                reason,
            )
        if trainer.faults.loses_clients and outcomes:
            found = list(outcomes.values())
            if trainer.is_global_zero:
                trainer.counter.add("client/selected", len(found))
                for name in ("finished", "dropped", "late"):
                    trainer.counter.add(f"client/{name}", found.count(name))
            if "finished" not in found:
                _log.warning(
                    "round %d: none of the %d selected clients took part (%s): no update is "
                    "averaged in this round",
                    trainer.round_index, len(found), described(found),
                )  # fmt: skip
        self.outcomes, self.reasons = {}, {}


def described(outcomes: Iterable[Outcome]) -> str:
    """The clients that did not take part by reason: ``2 dropped out, 1 late``.

    Args:
        outcomes: Of all selected clients of a round.
    """
    found = list(outcomes)
    return ", ".join(
        f"{found.count(name)} {phrase}" for name, phrase in _PHRASES.items() if name in found
    )
