"""The keys of a trainer that say which selected clients report back in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.system import Availability, SystemModel


@dataclass(frozen=True)
class Reporting:
    """How many clients are selected, which of them may drop out or be late, and how many updates the server needs.

    Attributes:
        clients_per_round: k, the updates that the server needs, ``trainer.clients_per_round``.
        over_selection: x, ``trainer.over_selection``.
        availability: Decides who drops out; None: nobody.
        system: How long clients take; None: all take no time.
        deadline_s: Simulated seconds from the broadcast after which an update is late; None: the server waits.

    Raises:
        ValueError: Names the key and the remedy.
    """

    clients_per_round: int
    over_selection: float = 0.0
    availability: Availability | None = None
    system: SystemModel | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.over_selection < math.inf:
            raise ValueError(
                f"trainer.over_selection is {self.over_selection}: give 0 or more; 0.3 selects 30 % more clients"
            )
        if self.deadline_s is None:
            return
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"trainer.deadline_s is {self.deadline_s}: give simulated seconds above 0, or null")
        if self.system is None:
            raise ValueError(
                f"trainer.deadline_s is {self.deadline_s:g} simulated seconds, but nothing says how long a client "
                "takes: set trainer.system to a SystemModel, or leave trainer.deadline_s out"
            )

    @property
    def selected(self) -> int:
        """``k (1 + x)``, rounded up: the clients that the server selects in a round."""
        return math.ceil(round(self.clients_per_round * (1 + self.over_selection), 6))  # 100 * 1.1 is above 110

    @property
    def needed(self) -> int | None:
        """Updates after which the server waits no longer; None: it waits for all selected clients."""
        return self.clients_per_round if self.over_selection else None

    @property
    def has_late_clients(self) -> bool:
        """Whether a client that has trained may be left out of a round."""
        return self.deadline_s is not None or self.needed is not None

    @property
    def loses_clients(self) -> bool:
        """Whether a healthy client may be left out of a round."""
        return self.availability is not None or self.has_late_clients

    def check(self, algorithm: FederatedAlgorithm, num_clients: int) -> None:
        """Refuse keys that contradict the method or the data.

        Args:
            algorithm: The method.
            num_clients: All clients of the federation.

        Raises:
            ValueError: Names the key and the remedy.
        """
        if self.clients_per_round > num_clients:
            raise ValueError(
                f"trainer.clients_per_round is {self.clients_per_round}, but data.num_clients is only {num_clients}: "
                "lower the first or raise the second"
            )
        if self.selected > num_clients:
            raise ValueError(
                f"trainer.over_selection {self.over_selection:g} selects {self.selected} clients a round, but "
                f"data.num_clients is only {num_clients}: lower trainer.over_selection or trainer.clients_per_round"
            )
        if self.has_late_clients and isinstance(algorithm, JointAlgorithm):
            key = "over_selection" if self.deadline_s is None else "deadline_s"
            raise ValueError(
                f"trainer.{key} cannot be used with {type(algorithm).__name__}: its server trains on the features of "
                "all clients at every step, so no client can be left out at the end of a round; remove the key. "
                "Clients that drop out before the first step (trainer.availability) are possible"
            )
