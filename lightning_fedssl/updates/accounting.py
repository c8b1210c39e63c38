"""The privacy that a run has spent: events for the accountants of the library dp-accounting, and
what they mean.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

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
        cohort: Clients in a round: expected (``poisson``), or exactly (``fixed``).
        sampling: How the clients of a round are drawn.
        accountant: How the rounds are composed; ``fixed`` always takes RDP.
    """

    noise_multiplier: float
    rounds: int
    clients: int
    cohort: int
    sampling: Literal["poisson", "fixed"]
    accountant: Literal["pld", "rdp"]

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
        poisson, epsilon = self.sampling == "poisson", self.epsilon(delta)
        relation = "add or remove one client" if poisson else "replace one client by another"
        share = self.cohort / self.clients
        how = (
            f"each client with probability {share:.3g}"
            if poisson
            else f"{self.cohort} of {self.clients:,} without replacement"
        )
        accountant = self.accountant.upper() if poisson else "RDP"
        return {
            "epsilon": epsilon, "delta": delta, "unit": "client", "neighbouring_relation": relation,
            "sampling": f"{self.sampling}: "
                        f"{how}", "population": self.clients, "rounds": self.rounds,
            "noise_multiplier": self.noise_multiplier, "accountant": accountant,
            "statement": f"epsilon {epsilon:.3g} at delta {delta:g} for one client ({relation}) "
                         f"after {self.rounds} "
            f"rounds, accounted by {accountant} for a population of {self.clients:,} clients, of "
            "which a round draws "
            f"{how}",
        }  # fmt: skip


@lru_cache(maxsize=256)
def _epsilon(settings: tuple[Any, ...], delta: float) -> float:
    budget = Budget(*settings)
    if not budget.rounds:
        return 0.0
    if budget.noise_multiplier < LEAST_NOISE:
        return math.inf
    dp, pld, rdp = _library()
    if budget.sampling == "fixed":  # replacing a client moves the sum by up to two clips
        relation, noise = (
            dp.NeighboringRelation.REPLACE_ONE,
            dp.GaussianDpEvent(budget.noise_multiplier / 2),
        )
        event = dp.SampledWithoutReplacementDpEvent(budget.clients, budget.cohort, noise)
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
    else:
        relation, noise = (
            dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
            dp.GaussianDpEvent(budget.noise_multiplier),
        )
        event = dp.PoissonSampledDpEvent(budget.cohort / budget.clients, noise)
        accountant = (
            pld.PLDAccountant(relation, DISCRETIZATION * max(1, 0.1 / budget.noise_multiplier**2))
            if budget.accountant == "pld"
            else rdp.RdpAccountant(neighboring_relation=relation)
        )
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
    low, high = 0.0, 1.0
    while _epsilon((high, *rest), delta) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise ValueError(
                f"CentralDP: no noise reaches epsilon {epsilon:g}; at least "
                f"{_epsilon((high, *rest), delta):.3g} "
                f"can be shown for delta {delta:g}: raise them, or take sampling poisson with "
                "accountant pld"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _epsilon((middle, *rest), delta) <= epsilon else (middle, high)
    return high


def _library() -> tuple[Any, Any, Any]:
    """dp-accounting and its two accountants.

    Both write warnings about single orders, which change no result.
    """
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "CentralDP needs the package dp-accounting: pip install '.[privacy]'"
        ) from error
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting, pld, rdp
