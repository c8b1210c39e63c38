"""How many local steps the clients of a round make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.state import ClientUpdate
    from lightning_fedssl.trainer_interface import TrainerInterface


class LocalSteps(FederatedCallback):
    """Logs the least, mean and largest number of local steps tau_k of a round, as ``client/steps_min`` and so on."""

    def __init__(self) -> None:
        self._steps: list[int] = []

    def on_client_end(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, update: ClientUpdate) -> None:
        """Note a client's steps."""
        self._steps.append(update.num_steps)

    def on_aggregate(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Log over the clients of all ranks."""
        steps = [count for part in trainer.gather(self._steps) for count in part]
        self._steps = []
        if steps:
            trainer.log("client/steps_min", min(steps))
            trainer.log("client/steps_mean", sum(steps) / len(steps))
            trainer.log("client/steps_max", max(steps))
