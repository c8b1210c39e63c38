"""Logs the number of local steps of a round's clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import Run
    from lightning_fedssl.state import ClientUpdate


class LocalSteps(FederatedCallback):
    """Logs minimum, mean and maximum of the clients' local steps tau_k: ``client/steps_min``,
    ``_mean``, ``_max``.

    The steps of a client whose update was rejected do not count: they are not in the new
    model.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._steps: dict[int, int] = {}

    def on_client_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Store a client's number of steps."""
        self._steps[update.client] = update.num_steps

    def on_global_model(self, trainer: Run, algorithm: FederatedAlgorithm) -> None:
        """Log minimum, mean and maximum over the accepted clients of all ranks."""
        everyone = {
            client: count for part in trainer.gather(self._steps) for client, count in part.items()
        }
        steps = [
            everyone[k]
            for k, outcome in trainer.participation.items()
            if outcome == "finished" and k in everyone
        ]
        self._steps = {}
        if steps:
            trainer.log("client/steps_min", min(steps))
            trainer.log("client/steps_mean", sum(steps) / len(steps))
            trainer.log("client/steps_max", max(steps))
