"""Lightning's names: what a federated run calls otherwise, and what Lightning's callbacks read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import RunningStage

from lightning_fedssl.callbacks.checkpoint import FederatedCheckpoint
from lightning_fedssl.run import TrainerView
from lightning_fedssl.storage.other_names import OTHER_NAMES

if TYPE_CHECKING:
    from torch.optim import Optimizer

WRITERS = (Checkpoint, FederatedCheckpoint)
"""Callbacks that write checkpoints."""

SAME = {
    "check_val_every_n_epoch": "check_val_every_n_rounds",
    "estimated_stepping_batches": "max_rounds",
    "global_step": "round_index",
    "lightning_module": "algorithm.lightning_module",
    "local_rank": "fabric.local_rank",
    "logged_metrics": "callback_metrics",
    "max_epochs": "max_rounds",
    "model": "algorithm.lightning_module",
    "num_devices": "world_size",
    "strategy": "fabric.strategy",
}
"""Lightning's attributes by what they are here. ``model`` is the user's module where the algorithm
trains one, else the algorithm."""

STAGES = {
    "predicting": RunningStage.PREDICTING,
    "validating": RunningStage.VALIDATING,
    "testing": RunningStage.TESTING,
}
"""Lightning's questions for the command."""


class LightningNames(TrainerView):
    """What Lightning's callbacks read of a trainer, with a round as the epoch and as its step."""

    sanity_checking = False
    val_check_interval = 1.0
    num_val_batches = (1,)
    num_training_batches = 1
    progress_bar_callback = None
    received_sigterm = False
    lr_scheduler_configs: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        if name in SAME:
            return attrgetter(SAME[name])(self)
        if name in STAGES:
            return self.state.stage == STAGES[name]
        if name in OTHER_NAMES:
            raise AttributeError(f"{type(self).__name__} has no {name}: {OTHER_NAMES[name]}")
        return object.__getattribute__(self, name)

    @property
    def current_epoch(self) -> int:
        """Rounds before this one: Lightning counts epochs from 0."""
        return max(self.round_index - 1, 0)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the clients' and of the server's steps."""
        return [self.client_optimizer, self.run.server_optimizer]

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, WRITERS)]

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that writes checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)
