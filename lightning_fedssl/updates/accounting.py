"""The privacy that a run has spent: events for an accountant of the library dp-accounting, and
what they mean.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from lightning_fedssl.storage.optional import optional

DISCRETIZATION = 1e-3
"""The grid of the privacy losses (PLD): coarser than the library's 1e-4, ten times as fast, and
still an upper bound.

In the cases of the tests it is less than 0.5 % above the library's epsilon. With a small noise
multiplier z the losses grow as ``1 / z^2``, and so does the grid.
"""

LEAST_NOISE = 1e-3
"""A smaller noise multiplier counts as none; the library cannot account for every one."""

LARGEST_NOISE = 1e6
"""The largest noise multiplier that is tried."""


@dataclass(frozen=True)
class Budget:
    """What determines epsilon.

    Attributes:
        noise_multiplier: z; the noise on the sum has the standard deviation ``z * clip``.
        rounds: Rounds in which a noisy sum was published.
        clients: M, all clients of the federation that is accounted for.
        cohort: Clients that are expected in a round.
    """

    noise_multiplier: float
    rounds: int
    clients: int
    cohort: int

    def epsilon(self, delta: float, more_rounds: int = 0) -> float:
        """Epsilon after the rounds, and after more of the same kind.

        Args:
            delta: Delta.
            more_rounds: Further rounds.
        """
        settings = {**asdict(self), "rounds": self.rounds + more_rounds}
        return _epsilon(tuple(settings.values()), delta)

    def describe(self, delta: float) -> dict[str, Any]:
        """Epsilon with everything that it depends on, as plain values.

        ``statement`` says it in one sentence.

        Args:
            delta: Delta.
        """
        epsilon = self.epsilon(delta)
        relation = "add or remove one client"
        how = f"each client with probability {self.cohort / self.clients:.3g}"
        return {
            "epsilon": epsilon, "delta": delta, "unit": "client", "neighbouring_relation": relation,
            "sampling": f"poisson: {how}", "population": self.clients, "rounds": self.rounds,
            "noise_multiplier": self.noise_multiplier, "accountant": "PLD",
            "statement": f"epsilon {epsilon:.3g} at delta {delta:g} for one client ({relation}) "
                         f"after {self.rounds} rounds, accounted by PLD for a population of "
                         f"{self.clients:,} clients, of which a round draws {how}",
        }  # fmt: skip


@lru_cache(maxsize=256)
def _epsilon(settings: tuple[Any, ...], delta: float) -> float:
    budget = Budget(*settings)
    if not budget.rounds:
        return 0.0
    if budget.noise_multiplier < LEAST_NOISE:
        return math.inf
    dp, pld = optional("dp_accounting"), optional("dp_accounting.pld")
    noise = dp.GaussianDpEvent(budget.noise_multiplier)
    event = dp.PoissonSampledDpEvent(budget.cohort / budget.clients, noise)
    grid = DISCRETIZATION * max(1, 0.1 / budget.noise_multiplier**2)
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, grid)
    return float(accountant.compose(event, budget.rounds).get_epsilon(delta))


def calibrated(budget: Budget, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier with which a budget's rounds spend at most epsilon, up to 0.1 %
    of it.

    Args:
        budget: The rounds; its noise multiplier is not read.
        epsilon: Epsilon.
        delta: Delta.

    Raises:
        ValueError: The accountant's bound stays above epsilon, whatever the noise.
    """
    rest = tuple(asdict(budget).values())[1:]
    low = 0.0
    high = 1.0
    while _epsilon((high, *rest), delta) > epsilon:
        low = high
        high = 2 * high
        if high > LARGEST_NOISE:
            raise ValueError(
                f"CentralDP: no noise reaches epsilon {epsilon:g}; at least "
                f"{_epsilon((high, *rest), delta):.3g} can be shown for delta {delta:g}: raise them"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _epsilon((middle, *rest), delta) <= epsilon else (middle, high)
    return high
