"""The trainer as callbacks, loggers and Lightning's own code see it: a round is an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerState
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.federation import Direction
from lightning_fedssl.local_training import LocalTraining
from lightning_fedssl.system import Outcome
from lightning_fedssl.trainer import checkpointing
from lightning_fedssl.trainer.run import Run, Status
from lightning_fedssl.trainer.run_folder import RunFolder
from lightning_fedssl.trainer.settings import table_row_of


class TrainerView:
    """Reads the state of the trainer's command; implements :class:`TrainerInterface` together with the keys.

    Attributes:
        status: What the trainer reports, during a command and after it.
        folder: The loggers.
        run: The present command or the last one; not set before the first, nor where ranks are spawned.
    """

    fabric: Fabric
    dtype: torch.dtype
    max_rounds: int
    check_val_every_n_rounds: int
    fast_dev_run: bool
    callbacks: list[Callback]
    status: Status
    folder: RunFolder
    run: Run

    # What callbacks may do.

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add a value to the round's weighted mean of a scalar, over all ranks."""
        self.run.log(name, value, weight)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank must call it."""
        return collectives.gather(self.fabric, value)

    def local_data(self, party: int) -> LocalData:
        """What a client, or the server (``sampling.SERVER``), may train on in this round."""
        return self.run.local_data(party)

    def drops_out(self, client: int) -> bool:
        """Whether a client, selected or not, cannot send anything in this round."""
        return self.run.drops_out(client)

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Count tensors that a client receives (``down``) or sends (``up``) in addition to broadcast and update."""
        self.run.transfer(client, direction, sizes)

    def save_checkpoint(self, path: str | Path, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a checkpoint, completely or not at all; every rank must call it, rank 0 writes.

        Args:
            path: The file.
            weights_only: Leave out the clients' states, such as their optimizers' momentum. A run whose clients have
                states cannot be resumed from such a checkpoint.
            storage_options: Accepted for Lightning's callbacks and not used.
        """
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save(self.run, Path(path), bool(weights_only))
        self.fabric.barrier()

    def save_model(self, folder: str | Path) -> None:
        """Write the global model as ``model.safetensors`` and ``model.json``; every rank must call it, rank 0 writes.

        Args:
            folder: The folder; it is made.
        """
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save_model(self.run, Path(folder))
        self.fabric.barrier()

    # What a command reports.

    @property
    def round_index(self) -> int:
        """The round, from 1; before the first round 0, or the round of the checkpoint that the run resumes."""
        return self.status.round_index

    @property
    def cohort(self) -> list[int]:
        """The clients of this round, in drawn order, the same on every rank."""
        return self.status.cohort

    @property
    def participation(self) -> Mapping[int, Outcome]:
        """What became of each selected client of the last round whose clients trained, in drawn order."""
        return self.status.participation

    @property
    def table_row(self) -> dict[str, str | float | bool]:
        """The settings of trainer, data and model by their keys, flattened to texts, numbers and booleans."""
        return table_row_of(self.run)

    @property
    def total_bytes(self) -> float:
        """Bytes that clients received and sent in all rounds."""
        return self.status.total_bytes

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The last value of every scalar, by name."""
        return self.status.callback_metrics

    @property
    def metric_values(self) -> dict[str, Tensor]:
        """The last value of every evaluation metric, by name, such as the matrix ``val/confusion_matrix``."""
        return self.status.metric_values

    @property
    def predictions(self) -> Tensor | None:
        """Class probabilities of the last ``predict``, ``(test images, classes)``."""
        return self.status.predictions

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this round; a callback may set it, on any rank."""
        return self.status.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.status.should_stop = stop

    @property
    def state(self) -> TrainerState:
        """Lightning's name for the command, and whether it runs, was interrupted or has finished."""
        return self.status.state

    @property
    def evaluates_now(self) -> bool:
        """Whether this round ends with an evaluation of the global model."""
        return self.run.evaluates_now

    @property
    def client_lr(self) -> float:
        """The learning rate of the clients' steps."""
        return self.run.client_lr

    @property
    def client_optimizer(self) -> Optimizer:
        """The optimizer of the clients' steps."""
        return self.run.client_optimizer

    @property
    def server_optimizer(self) -> Optimizer:
        """The optimizer of the server's steps."""
        return self.run.server_optimizer

    @property
    def local_training(self) -> LocalTraining:
        """Trains the clients of a round."""
        return self.run.local_training

    # Ranks and files.

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.fabric.is_global_zero

    @property
    def global_rank(self) -> int:
        """The number of this rank, from 0."""
        return self.fabric.global_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.fabric.world_size

    @property
    def loggers(self) -> list[Logger]:
        """The loggers of the run."""
        return self.folder.loggers

    @property
    def log_dir(self) -> str | None:
        """The folder of the run, the same on every rank once the run has begun; None without loggers."""
        return self.folder.log_dir

    # Lightning's names for the same things.

    sanity_checking = False
    val_check_interval = 1.0
    num_val_batches = (1,)
    received_sigterm = False

    @property
    def strategy(self) -> Strategy:
        """Fabric's strategy."""
        return self.fabric.strategy

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def current_epoch(self) -> int:
        """Rounds before this one: Lightning counts epochs from 0."""
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
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]
