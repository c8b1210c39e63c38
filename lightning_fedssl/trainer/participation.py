"""What became of every selected client of a round: who dropped out, who was
rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from lightning_fedssl.functional.by_name import taken
from lightning_fedssl.run import Run
from lightning_fedssl.system import Outcome

_log = logging.getLogger(__name__)

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
        trainer, outcomes = self.trainer, self.outcomes
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
                trainer.counter.add("client/selected", len(found))
                for name in ("finished", "dropped"):
                    trainer.counter.add(f"client/{name}", found.count(name))
            if "finished" not in found:
                _log.warning(
                    "round %d: none of the %d selected clients took part (%s): no update is "
                    "averaged in this round",
                    trainer.round_index, len(found), described(found),
                )  # fmt: skip
        self.outcomes, self.reasons = {}, {}


def described(outcomes: Iterable[Outcome]) -> str:
    """The clients that did not take part by reason: ``2 dropped out, 1 rejected``.

    Args:
        outcomes: Of all selected clients of a round.
    """
    found = list(outcomes)
    return ", ".join(
        f"{found.count(name)} {phrase}" for name, phrase in _PHRASES.items() if name in found
    )
