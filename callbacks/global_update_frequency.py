"""Adapts the number of server steps per round to the change of the server's loss (Semi-SFL,
Eq. 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView


class GlobalUpdateFrequency(FederatedCallback):
    """Adapts K_s, the global updating frequency, at milestones; logs it as ``server/steps``.

    ``Delta`` is the mean of ``server/loss`` over the last ``window`` rounds minus the mean over the
    ``window`` rounds before. After a milestone round h, ``|Delta| < rho_1`` halves K_s (integer
    division, at least 1), and ``|Delta| > rho_2`` doubles it; otherwise K_s does not change. The
    new value applies from round h + 1. The paper does not state the initial K_s, the milestones and
    the minimum of K_s. The milestones here are those of the authors' code for 1,000 rounds. An
    initial K_s of 80, halved at the last four milestones, gives the paper's mean of 32.5.

    Args:
        start: K_s in the first round.
        milestones: M, the rounds after which K_s may change, ascending.
        rho_1: Smallest change of the loss for which K_s does not change.
        rho_2: Largest change of the loss for which K_s does not change.
        window: Number of rounds in each of the two means.
    """

    saved = ("value", "losses")

    def __init__(
        self,
        start: int = 80,
        milestones: Sequence[int] = (150, 250, 400, 600, 700),
        rho_1: float = 0.01,
        rho_2: float = 0.05,
        window: int = 10,
    ) -> None:
        if start < 1 or window < 1:
            raise ValueError(
                f"GlobalUpdateFrequency: start is {start} and window {window}: the server makes at "
                "least one step in a round, and a mean is over at least one round"
            )
        if not 0 < rho_1 < rho_2:
            raise ValueError(
                f"GlobalUpdateFrequency: give 0 < rho_1 < rho_2, not {rho_1} and {rho_2}"
            )
        if (first := min(milestones, default=2 * window)) < 2 * window:
            raise ValueError(
                f"GlobalUpdateFrequency: the milestone {first} comes before two windows of "
                f"{window} rounds are full: give {2 * window} or more, or a smaller window"
            )
        self.start = start
        self.milestones = tuple(milestones)
        self.rho_1 = rho_1
        self.rho_2 = rho_2
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.value = self.start
        self.losses: list[float] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject a method whose number of server steps cannot be adapted."""
        if not getattr(pl_module, "adapts_server_steps", False):
            raise ValueError(
                f"GlobalUpdateFrequency has nothing to adapt in {type(pl_module).__name__}: set "
                "model.server_steps to null (SemiSFL, FedSwitchSL), or leave the callback out"
            )

    def on_round_start(self, trainer: TrainerView, algorithm: Any) -> None:
        """Set the method's K_s."""
        algorithm.server_steps = self.value
        trainer.log("server/steps", self.value)

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Store the round's loss, if the server has made a step; after a milestone, update K_s."""
        if "server/loss" in metrics:
            self.losses = [*self.losses, metrics["server/loss"]][-2 * self.window :]
        if trainer.round_index in self.milestones:
            self.value = self.next_value()

    def next_value(self) -> int:
        """K_s after a milestone, computed from the losses of the two windows.

        It stays the same until both are full.
        """
        if len(self.losses) < 2 * self.window:
            return self.value
        earlier = self.losses[: self.window]
        last = self.losses[self.window :]
        change = abs(sum(last) - sum(earlier)) / self.window
        if change < self.rho_1:
            return max(1, self.value // 2)
        return 2 * self.value if change > self.rho_2 else self.value
