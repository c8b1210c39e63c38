"""Which selected clients report back: the options ``trainer.faults``."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fedssl.system.availability import Availability


@dataclass(frozen=True)
class Faults:
    """Clients that drop out of rounds.

    Args:
        availability: Which clients drop out of a round: they receive the model and send nothing.
            ``RandomDropout`` or a subclass of ``Availability``; left out, nobody drops out.
    """

    availability: Availability | None = None

    def drops_out(self, seed: int, round_index: int, client: int) -> bool:
        """Whether a client drops out of a round; see :meth:`Availability.drops_out`."""
        availability = self.availability
        return availability is not None and availability.drops_out(seed, round_index, client)
