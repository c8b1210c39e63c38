"""Robust aggregation: rules that combine a round's updates so that a few of them cannot decide the
result.

The server has all updates of a round at once, on every rank the same ones in the same order. A rule
makes one update of them, which then enters the method's average alone. Every update counts once,
whatever ``model.client_weighting`` says: a number of images is what a client claims. The updates
are rows ``(clients, numbers)`` of all weights and buffers that a client uploads, so a round needs
the memory of its whole cohort.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.run import TrainerView
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates.rule import UpdateRule

_log = logging.getLogger(__name__)

_OWN = {
    "accumulate": "sums the updates in a way of its own",
    "on_client_end": "changes what clients upload",
    "client_weight": "weighs the updates in a way of its own",
}


def why_not_a_mean(algorithm: FederatedAlgorithm) -> str | None:
    """Why the server of a method needs more of a round than the mean of its updates; None if it
    does not.

    Without a reason the method *needs only sums*: its server computes the same from the sum of the
    updates alone, so that privacy, robust aggregation and secure aggregation apply to it.

    Args:
        algorithm: The method.

    Returns:
        The end of a sentence about the method: "FedRGD *sums the updates in a way of its own*".
    """
    if isinstance(algorithm, JointAlgorithm):
        return "exchanges features and gradients with every client at every step"
    if not algorithm.trains_clients:
        return "trains no client"
    for name, reason in _OWN.items():
        if getattr(type(algorithm), name) is not getattr(FederatedAlgorithm, name):
            return f"{reason} ({name})"
    return None


def require_a_mean(rule: UpdateRule, algorithm: FederatedAlgorithm) -> None:
    """Refuse a method whose server needs more of a round than the mean of its updates."""
    if reason := why_not_a_mean(algorithm):
        raise ValueError(
            f"trainer.updates: {type(rule).__name__} cannot be used with "
            f"{type(algorithm).__name__}, which {reason}: choose a method that averages its "
            "clients' models, such as FedAvg, FixMatch or SemiFL"
        )


class Aggregator(UpdateRule, ABC):
    """The base of robust rules: one of your own defines :meth:`aggregate`."""

    def check(self, trainer: TrainerView) -> None:
        """Refuse methods whose server needs more than a mean, and rounds of too few clients."""
        require_a_mean(self, trainer.algorithm)
        if trainer.clients_per_round < self.min_updates():
            raise ValueError(
                f"trainer.updates: {type(self).__name__} does not keep its promise for so few "
                f"clients: set trainer.clients_per_round to {self.min_updates()} or more, or take "
                "Median (3 or more), a larger TrimmedMean.share or fewer Krum.attackers"
            )

    @abstractmethod
    def aggregate(self, updates: Tensor) -> Tensor:
        """Combine the updates of a round.

        Args:
            updates: A client's weights and buffers in each row, ``(clients, numbers)``; at least
                one row.

        Returns:
            ``(numbers,)``.
        """

    def min_updates(self) -> int:
        """The smallest number of updates for which the rule withstands one liar, and Krum its
        attackers.
        """
        return 3

    def combine(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, updates: Iterator[ClientUpdate]
    ) -> Iterator[ClientUpdate]:
        """One update in place of a round's updates; none if they are too few for the rule."""
        rows = []
        last = None
        for last in updates:
            rows.append(torch.cat([t.detach().flatten() for t in last.model().values()]))
        if 0 < len(rows) < self.min_updates():
            text = "trainer.updates: %d updates of a round are not used: a rule needs %d or more"
            _log.warning(text, len(rows), self.min_updates())
        elif last is not None:
            values = self.aggregate(torch.stack(rows))
            parameters = dict(last.parameters)
            buffers = dict(last.buffers)
            for state in (parameters, buffers):
                for name, t in state.items():
                    state[name] = values[: t.numel()].view_as(t).to(t.dtype)
                    values = values[t.numel() :]
            yield ClientUpdate(last.client, parameters, buffers, num_samples=1, num_steps=1)


class TrimmedMean(Aggregator):
    """The mean of each number without its largest and smallest values (Yin et al., ICML 2018, arXiv
    1803.01498).

    Args:
        share: beta, the share of the updates that is left out at either end, rounded down to a
            number of 1 or more.

    Example:
        >>> import torch
        >>> TrimmedMean(0.2).aggregate(torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e6]]))
        tensor([2.])
    """

    def __init__(self, share: float = 0.2) -> None:
        if not 0 < share < 0.5:
            raise ValueError(f"TrimmedMean.share is {share}: give a share between 0 and 0.5")
        self.share = share

    def min_updates(self) -> int:
        """The smallest number of updates of which one is left out at either end."""
        return math.ceil(1 / self.share)

    def aggregate(self, updates: Tensor) -> Tensor:
        """The mean between the ends."""
        return _middle(updates, int(self.share * len(updates) + 1e-9))  # 0.29 of 100 is 29


class Median(Aggregator):
    """The median of each number, with an even number of updates the mean of both middle values (Yin
    et al., 2018).

    Example:
        >>> import torch
        >>> Median().aggregate(torch.tensor([[0.0, 2.0], [1.0, 2.0], [1e6, 2.0]]))
        tensor([1., 2.])
    """

    def aggregate(self, updates: Tensor) -> Tensor:
        """The median."""
        return _middle(updates, (len(updates) - 1) // 2)


class Krum(Aggregator):
    """The one update that lies closest to its neighbours (Blanchard et al., NeurIPS 2017, arXiv
    1703.02757).

    The score of an update is the sum of its squared distances to the ``n - f - 2`` nearest others,
    at least one. It takes ``2 f + 3`` updates: of fewer, f equal ones are closest to each other.

    Args:
        attackers: f, the largest number of attackers in a round.

    Example:
        >>> import torch
        >>> Krum(attackers=1).aggregate(torch.tensor([[0.0], [1.0], [2.0], [4.0], [1e6]]))
        tensor([1.])
    """

    def __init__(self, attackers: int = 2) -> None:
        if attackers < 1:
            raise ValueError(f"Krum.attackers is {attackers}: give 1 or more")
        self.attackers = attackers

    def min_updates(self) -> int:
        """``2 f + 3``: of fewer, f equal attackers are closest to each other."""
        return 2 * self.attackers + 3

    def aggregate(self, updates: Tensor) -> Tensor:
        """The update with the lowest score."""
        wide = updates.to(torch.promote_types(updates.dtype, torch.float32))  # 16 bits: no distance
        squared = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest = max(1, len(updates) - self.attackers - 2)
        others = squared.sort(dim=1).values[:, 1:]  # the first is the distance to itself
        return updates[others[:, :nearest].sum(dim=1).argsort(stable=True)[0]]


def _middle(updates: Tensor, left_out: int) -> Tensor:
    """The mean of each number without so many values at either end."""
    return updates.sort(dim=0).values[left_out : len(updates) - left_out].mean(dim=0)
