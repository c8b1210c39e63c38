"""Which of the selected clients drop out of a round: they receive the model and send nothing back.

Every draw is a function of (seed, round, client). So nothing needs to be saved, ranks agree, and
two methods that run with the same seed lose the same clients in the same rounds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

from lightning_fedssl import sampling

Outcome = Literal["finished", "skipped", "late", "dropped", "rejected"]
"""The outcome of a round for a selected client.

``finished``: the server used its update; ``skipped``: it had nothing to train on; ``late``: its
update came after the deadline, or after enough others; ``dropped``: it received the model and sent
nothing; ``rejected``: the server did not accept its update.
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
                f"{round_index} a "
                f"probability of {probability}: it must be between 0 and 1"
            )
        return float(sampling.rng(seed, "drop-out", round_index, client).random()) < probability


class RandomDropout(Availability):
    """Every client drops out of every round with the same probability.

    Args:
        probability: How likely a selected client is to drop out of a round.
    """

    def __init__(self, probability: float = 0.1) -> None:
        _require_probability("RandomDropout.probability", probability)
        self.probability = probability

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        """The configured probability."""
        return self.probability


class UnevenDropout(Availability):
    """Every client has its own drop-out probability, which is the same in all rounds.

    Args:
        lowest: The probability of the most reliable clients.
        highest: The probability of the least reliable clients; each client's is drawn uniformly
            between the two.
    """

    def __init__(self, lowest: float = 0.0, highest: float = 0.5) -> None:
        _require_probability("UnevenDropout.lowest", lowest)
        _require_probability("UnevenDropout.highest", highest)
        if lowest > highest:
            raise ValueError(
                f"trainer.availability: UnevenDropout.lowest is {lowest}, above highest, "
                f"{highest}: exchange them"
            )
        self.lowest = lowest
        self.highest = highest

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        """The client's own probability."""
        place = float(sampling.rng(seed, "reliability", client).random())
        return self.lowest + (self.highest - self.lowest) * place


class DiurnalDropout(Availability):
    """Clients drop out by day more often than by night: a sine over the rounds, in each client's
    own time zone.

    ``p_k(t) = mean + amplitude * sin(2 pi (t / period + shift_k))``

    Args:
        mean: The drop-out probability over a whole day.
        amplitude: How far the probability rises above the mean by day, and falls below it by night.
        period: Rounds of a day.
        time_zones: Draw ``shift_k``, a fraction of a day, for each client by the seed; if not, all
            clients share one time zone, ``shift_k = 0``.
    """

    def __init__(
        self,
        mean: float = 0.3,
        amplitude: float = 0.3,
        period: float = 24.0,
        time_zones: bool = True,
    ) -> None:
        if not (mean - abs(amplitude) >= 0 and mean + abs(amplitude) <= 1):
            raise ValueError(
                f"trainer.availability: DiurnalDropout has mean {mean} and amplitude {amplitude}: "
                "mean - amplitude and "
                "mean + amplitude must be between 0 and 1"
            )
        if not 0 < period < math.inf:
            raise ValueError(
                f"trainer.availability: DiurnalDropout.period is {period}: give rounds of a day, "
                "above 0"
            )
        self.mean = mean
        self.amplitude = amplitude
        self.period = period
        self.time_zones = time_zones

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        """The probability at the client's time of day."""
        shift = float(sampling.rng(seed, "time zone", client).random()) if self.time_zones else 0.0
        day = round_index / self.period + shift
        probability = self.mean + self.amplitude * math.sin(2 * math.pi * day)
        return min(1.0, max(0.0, probability))  # the sum may leave the range by a rounding error


def _require_probability(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(
            f"trainer.availability: {key} is {value}: give a probability between 0 and 1"
        )
