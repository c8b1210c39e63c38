"""What Lightning's own callbacks, loggers and CLI ask of a trainer: a round is the epoch."""

from __future__ import annotations

from typing import Literal

from lightning.fabric import Fabric
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

Stage = Literal["fit", "validate", "test", "predict"]

LIGHTNING_STATES: dict[Stage, tuple[TrainerFn, RunningStage]] = {
    "fit": (TrainerFn.FITTING, RunningStage.TRAINING),
    "validate": (TrainerFn.VALIDATING, RunningStage.VALIDATING),
    "test": (TrainerFn.TESTING, RunningStage.TESTING),
    "predict": (TrainerFn.PREDICTING, RunningStage.PREDICTING),
}


class LightningView:
    """The attributes of a Lightning trainer that make sense for a federated one."""

    fabric: Fabric
    loggers: list[Logger]
    callbacks: list[Callback]
    round_index: int
    max_rounds: int
    check_val_every_n_rounds: int
    _log_dir: str | None = None

    sanity_checking = False
    val_check_interval = 1.0
    num_val_batches = (1,)
    received_sigterm = False

    @property
    def strategy(self) -> Strategy:
        """Fabric's strategy."""
        return self.fabric.strategy

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files."""
        return self.fabric.is_global_zero

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self.fabric.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.fabric.world_size

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The run's folder, the same on every rank once the run has begun; None without loggers."""
        if self._log_dir is None and self.loggers:
            self._log_dir = self.loggers[0].log_dir or self.loggers[0].save_dir
        return self._log_dir

    def share_log_dir(self) -> None:
        """Agree on rank 0's folder; every rank must call it."""
        self._log_dir = self.fabric.broadcast(self.log_dir)

    @property
    def current_epoch(self) -> int:
        """Rounds begun before this one: Lightning counts from 0."""
        return max(self.round_index - 1, 0)

    @property
    def global_step(self) -> int:
        """The round."""
        return self.round_index

    @property
    def max_epochs(self) -> int:
        """The length of the run in rounds."""
        return self.max_rounds

    @property
    def check_val_every_n_epoch(self) -> int:
        """Lightning's name for ``check_val_every_n_rounds``."""
        return self.check_val_every_n_rounds

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """Lightning's callbacks that write checkpoints."""
        return [c for c in self.callbacks if isinstance(c, Checkpoint)]
