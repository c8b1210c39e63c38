"""Ends a run when the mean of a loss over some rounds is below a threshold (Semi-SFL, Fig. 4).

In a checkout: ``--trainer.callbacks+=examples.diagnostics.stop_at_equilibrium.StopAtEquilibrium``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback, at_least

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import TrainerView


_log = logging.getLogger(__name__)


class StopAtEquilibrium(FederatedCallback):
    """Stops training after the first round at which the mean loss of the last ``window`` rounds is
    below ``threshold``.

    That is the rule by which Fig. 4 of Semi-SFL (arXiv 2307.15870) ends its runs. The paper does
    not say which loss it averages; the default is the server's. Semi-SFL's ``server/loss`` includes
    a contrastive loss, which is at least the logarithm of the number of positives and so never
    falls to 0.01: its suite watches ``server/cross_entropy``. The number of rounds is that of the
    run. A run that has ended trains no further round when it is resumed. If the loss is one of the
    clients, a round in which the server used no client's update does not count.

    Args:
        threshold: The mean loss below which the run ends.
        window: Number of rounds in the mean.
        monitor: The scalar of a round: ``server/loss``, ``client/loss`` or, for Semi-SFL,
            ``server/cross_entropy``.
    """

    def __init__(
        self, threshold: float = 0.01, window: int = 10, monitor: str = "server/loss"
    ) -> None:
        at_least(1, window=window)
        self.threshold = threshold
        self.window = window
        self.monitor = monitor
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.losses: list[float] = []

    def on_train_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """End a resumed run at once if the last rounds before its checkpoint are reason enough."""
        self._judge(trainer)

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: dict[str, float]
    ) -> None:
        """Store the round's loss; end the run if the mean of a full window is small enough.

        Raises:
            ValueError: The round has not logged the scalar.
        """
        if self.monitor not in metrics:
            if (
                self.monitor.startswith("client/")
                and "finished" not in trainer.participation.values()
            ):
                return
            raise ValueError(
                f"StopAtEquilibrium: round {trainer.round_index} has no scalar {self.monitor}"
            )
        self.losses = [*self.losses, metrics[self.monitor]][-self.window :]
        self._judge(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The losses of the window."""
        return {"losses": list(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.losses = list(state_dict["losses"])

    def _judge(self, trainer: TrainerView) -> None:
        mean = sum(self.losses) / self.window
        if len(self.losses) == self.window and mean < self.threshold:
            trainer.should_stop = True
            if trainer.is_global_zero:
                _log.info(
                    "StopAtEquilibrium: the mean of %s over the last %d rounds is %.4g, below the "
                    "threshold %g",
                    self.monitor,
                    self.window,
                    mean,
                    self.threshold,
                )
