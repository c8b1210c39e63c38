"""Logs the number of local steps of a round's clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.state import ClientUpdate
    from lightning_fedssl.trainer_interface import TrainerInterface


class LocalSteps(FederatedCallback):
    """Logs minimum, mean and maximum of the clients' local steps tau_k: ``client/steps_min``, ``_mean``, ``_max``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._steps: list[int] = []

    def on_client_end(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, update: ClientUpdate) -> None:
        """Store a client's number of steps."""
        self._steps.append(update.num_steps)

    def on_aggregate(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Log minimum, mean and maximum over the clients of all ranks."""
        steps = [count for part in trainer.gather(self._steps) for count in part]
        self._steps = []
        if steps:
            trainer.log("client/steps_min", min(steps))
            trainer.log("client/steps_mean", sum(steps) / len(steps))
            trainer.log("client/steps_max", max(steps))
