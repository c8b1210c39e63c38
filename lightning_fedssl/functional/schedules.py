"""Learning-rate schedules as functions of the round, so that a resumed run needs no scheduler
state.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["Constant", "Cosine", "FractionalCosine", "Schedule"]


class Schedule:
    """Base class of schedules: a factor by which the configured learning rate is multiplied; here
    always 1.

    A schedule of your own overrides :meth:`factor`; a configuration names it, ``model.schedule:
    mymodule.Halved``::

        class Halved(Schedule):
            def factor(self, round_index, max_rounds):
                return 0.5 ** ((round_index - 1) // 10)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class that is written as a function: its ``__call__`` would never be called.

        Raises:
            ValueError: If it has ``__call__`` and no ``factor`` of its own.
        """
        super().__init_subclass__(**kwargs)
        if callable(vars(cls).get("__call__")) and cls.factor is Schedule.factor:
            raise ValueError(
                f"the schedule {cls.__name__} has __call__, which is never called: name the method "
                "factor(self, round_index, max_rounds)"
            )

    def factor(self, round_index: float, max_rounds: int) -> float:
        """The factor of the learning rate in a round.

        Args:
            round_index: The round, from 1; a fraction is a position within the round.
            max_rounds: The number of rounds of the run.

        Returns:
            A finite number of 0 or more.
        """
        return 1.0

    def problem(self, max_rounds: int) -> str:
        """What does not fit a run of this length, for a warning at its start; empty if nothing.

        Args:
            max_rounds: The number of rounds of the run.
        """
        return ""

    def checked_factor(self, round_index: float, max_rounds: int) -> float:
        """The factor of :meth:`factor`, which may be the user's code.

        Raises:
            ValueError: If it is not a finite number of 0 or more.
        """
        factor = self.factor(round_index, max_rounds)
        if not hasattr(factor, "__float__") or not 0 <= float(factor) < math.inf:
            raise ValueError(
                f"model.schedule: {type(self).__name__}.factor({round_index:g}, {max_rounds}) is "
                f"{factor}; a factor of the learning rate is a finite number of 0 or more"
            )
        return float(factor)


class Constant(Schedule):
    """The configured learning rate in every round."""


class Cosine(Schedule):
    """Cosine annealing over the run: ``(1 + cos(pi (t - 1) / T)) / 2`` in round t, constant inside
    a round (SemiFL).

    Args:
        rounds: T; by default the trainer's ``max_rounds``.
        final: The factor at the end of the curve.

    Example:
        >>> [round(Cosine().factor(t, 4), 2) for t in (1, 2, 3, 4)]
        [1.0, 0.85, 0.5, 0.15]
    """

    def __init__(self, rounds: int | None = None, final: float = 0.0) -> None:
        if rounds is not None and rounds < 1:
            raise ValueError(f"model.schedule.rounds is {rounds}: give at least 1, or leave it out")
        if not 0 <= final < math.inf:
            raise ValueError(
                f"model.schedule.final is {final}: give 0 or more; a learning rate cannot be "
                "negative or infinite"
            )
        self.rounds = rounds
        self.final = final

    def factor(self, round_index: float, max_rounds: int) -> float:
        """The factor in a round; see :meth:`Schedule.factor`."""
        progress = min((round_index - 1) / (self.rounds or max_rounds), 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


class FractionalCosine(Schedule):
    """Linear warm-up, then a part of a cosine's period: ``max(cos(pi c (s - s_w) / (S - s_w)),
    floor)`` (FedRGD).

    s is the time in rounds before a step: ``t - 1 + i / T`` at step i of T in round t for methods
    that count a round in T steps (``steps_per_round``), else ``t - 1`` in all of round t. A warm-up
    begins at 0.

    With the default fraction, FixMatch's 7/16, the factor falls to 0.195 at the end of a run of any
    length; with 1/2 it falls to 0. With a fraction above 1, or beyond ``rounds``, the cosine rises
    again, as in some published settings.

    Args:
        fraction: c, the number of half-periods of the cosine in ``rounds``.
        rounds: S; by default the trainer's ``max_rounds``.
        warmup_rounds: s_w, rounds in which the factor grows from 0 to 1.
        floor: The smallest factor after the warm-up.
    """

    def __init__(
        self,
        fraction: float = 7 / 16,
        rounds: int | None = None,
        warmup_rounds: float = 0,
        floor: float = 0.0,
    ) -> None:
        if not all(0 <= value < math.inf for value in (warmup_rounds, fraction, floor)):
            raise ValueError(
                "model.schedule: fraction, warmup_rounds and floor must be finite and 0 or more"
            )
        if rounds is not None and rounds <= warmup_rounds:
            raise ValueError(
                f"model.schedule.rounds is {rounds}: give more than warmup_rounds, {warmup_rounds}"
            )
        self.fraction = fraction
        self.rounds = rounds
        self.warmup_rounds = warmup_rounds
        self.floor = floor

    def problem(self, max_rounds: int) -> str:
        """A warning where all rounds are warm-up; it is not an error, because a short trial of a
        long configuration may have that.
        """
        if not 0 < max_rounds <= self.warmup_rounds:
            return ""
        return (
            f"model.schedule.warmup_rounds is {self.warmup_rounds:g}, but the run has {max_rounds} "
            "rounds: all is warm-up, and the first round trains with rate 0; lower warmup_rounds, "
            "or raise trainer.max_rounds"
        )

    def factor(self, round_index: float, max_rounds: int) -> float:
        """The factor in a round; see :meth:`Schedule.factor`."""
        done = round_index - 1
        if done < self.warmup_rounds:
            return done / self.warmup_rounds
        span = (self.rounds or max_rounds) - self.warmup_rounds
        progress = (done - self.warmup_rounds) / span if span > 0 else 0.0
        return max(math.cos(math.pi * self.fraction * progress), self.floor)
