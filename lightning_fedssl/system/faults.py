"""Which selected clients report back: the options ``trainer.faults``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_fedssl.system.availability import Availability


@dataclass(frozen=True)
class Faults:
    """Clients that drop out or are late, and how many more clients are selected because of them.

    Args:
        availability: Which clients drop out of a round: they receive the model and send nothing.
            ``RandomDropout`` or a subclass of ``Availability``; left out, nobody drops out.
        deadline_s: Simulated seconds (of ``trainer.system``) from the broadcast after which an
            update is late and not used.
        over_selection: Select ``clients_per_round * (1 + over_selection)`` clients, and use the
            updates of the first ``clients_per_round`` that finish in the simulated time of
            ``trainer.system``; without it, the first drawn ones.
    """

    availability: Availability | None = None
    deadline_s: float | None = None
    over_selection: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.over_selection < math.inf:
            raise ValueError(
                f"trainer.faults.over_selection is {self.over_selection}: give 0 or more; 0.3 "
                "selects 30 % more clients"
            )
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ValueError(
                f"trainer.faults.deadline_s is {self.deadline_s}: give simulated seconds above 0, "
                "or null"
            )

    def selected(self, clients_per_round: int) -> int:
        """``k (1 + x)``, rounded up: the clients that the server selects in a round."""
        return math.ceil(
            round(clients_per_round * (1 + self.over_selection), 6)
        )  # 100 * 1.1 is above 110

    @property
    def has_late_clients(self) -> bool:
        """Whether a client that has trained may be left out of a round."""
        return self.deadline_s is not None or self.over_selection > 0

    @property
    def loses_clients(self) -> bool:
        """Whether a healthy client may be left out of a round."""
        return self.availability is not None or self.has_late_clients
