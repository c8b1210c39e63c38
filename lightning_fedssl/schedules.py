"""Learning-rate schedules as functions of the round, so that resuming needs no scheduler state."""

from __future__ import annotations

import math


class Schedule:
    """The base of all schedules: a factor on the configured learning rate; this one is constant."""

    def factor(self, round_index: float, max_rounds: int) -> float:
        """The factor in a round.

        Args:
            round_index: The round, from 1; a fraction means a place within the round.
            max_rounds: The length of the run in rounds.
        """
        return 1.0


class Constant(Schedule):
    """The configured learning rate in every round."""


class Cosine(Schedule):
    """Cosine annealing over the run: ``(1 + cos(pi (t - 1) / T)) / 2`` in round t, constant inside a round (SemiFL).

    Args:
        rounds: T, if it is not the trainer's ``max_rounds``.
        final: The factor the curve ends at.
    """

    def __init__(self, rounds: int | None = None, final: float = 0.0) -> None:
        if rounds is not None and rounds < 1:
            raise ValueError(f"model.schedule.rounds is {rounds}: give at least 1, or leave it out")
        self.rounds = rounds
        self.final = final

    def factor(self, round_index: float, max_rounds: int) -> float:
        """The factor in a round; see :meth:`Schedule.factor`."""
        progress = min((round_index - 1) / (self.rounds or max_rounds), 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
