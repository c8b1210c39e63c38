"""Which of the selected clients drop out of a round: they receive the model and send nothing back.

Every draw is a function of (seed, round, client). So nothing needs to be saved, ranks agree, and
two methods that run with the same seed lose the same clients in the same rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from lightning_fedssl import sampling

Outcome = Literal["finished", "skipped", "dropped", "rejected"]
"""The outcome of a round for a selected client.

``finished``: the server used its update; ``skipped``: it had nothing to train on; ``dropped``: it
received the model and sent nothing; ``rejected``: the server did not accept its update.
"""


class Availability(ABC):
    """Decides which clients drop out of a round; the base of ``trainer.availability``.

    A subclass defines a client's probability of dropping out. The trainer draws, counts what the
    client has received, and does not train it: its persistent state stays as it was before the
    round.
    """

    @abstractmethod
    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        """How likely a client is to drop out of a round, if it is selected.

        Args:
            seed: The run's seed.
            round_index: The round, from 1.
            client: The client, from 0.

        Returns:
            A probability between 0 and 1.
        """

    def drops_out(self, seed: int, round_index: int, client: int) -> bool:
        """Whether a client drops out of a round: one draw for each client and round.

        Raises:
            ValueError: If the probability is not between 0 and 1.
        """
        probability = self.dropout_probability(seed, round_index, client)
        if not 0 <= probability <= 1:
            raise ValueError(
                f"trainer.availability: {type(self).__name__} gives client {client} in round "
                f"{round_index} a probability of {probability}: it must be between 0 and 1"
            )
        return float(sampling.rng(seed, "drop-out", round_index, client).random()) < probability


class RandomDropout(Availability):
    """Every client drops out of every round with the same probability.

    Args:
        probability: How likely a selected client is to drop out of a round.
    """

    def __init__(self, probability: float = 0.1) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(
                f"trainer.faults.availability: RandomDropout.probability is {probability}: give a "
                "probability between 0 and 1"
            )
        self.probability = probability

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        """The configured probability."""
        return self.probability
