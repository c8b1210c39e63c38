"""What a callback may rely on: the attributes and methods of the ``trainer`` that every hook receives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.trainer.states import TrainerState
    from torch import Tensor

    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.federation import Direction
    from lightning_fedssl.system import Outcome


class TrainerInterface(Protocol):
    """The trainer as callbacks see it. Other attributes of a ``FederatedTrainer`` may change without notice.

    Lightning's names for the same things, such as ``current_epoch`` for the rounds before this one, are available, too.

    Attributes:
        max_rounds: The length of the run in rounds.
        clients_per_round: The configured number of clients in a cohort.
        check_val_every_n_rounds: Rounds from one evaluation on the validation images to the next.
        fast_dev_run: Whether this is a trial run of one round, which writes no file.
        enable_progress_bar: Whether a callback may print.
        default_root_dir: The folder that holds the folders of all runs.
        dtype: The type of the weights and of the images that the network receives.
        precision: The arithmetic, as in the configuration.
        fabric: Precision, device and ranks.
        ckpt_path: The checkpoint that the command resumes or evaluates; None if there is none.
    """

    max_rounds: int
    clients_per_round: int
    check_val_every_n_rounds: int
    fast_dev_run: bool
    enable_progress_bar: bool
    default_root_dir: str
    dtype: torch.dtype
    precision: Literal["32-true", "bf16-mixed", "64-true"]
    fabric: Fabric
    ckpt_path: Path | None

    @property
    def round_index(self) -> int:
        """The round, from 1; before the first round 0, or the round of the checkpoint that the run resumes."""

    @property
    def cohort(self) -> list[int]:
        """The clients of this round, in drawn order, the same on every rank."""

    @property
    def participation(self) -> Mapping[int, Outcome]:
        """What became of each selected client, in drawn order, the same on every rank.

        Of this round from ``on_global_model`` on, before that of the round before. Empty if no client was trained.
        """

    def drops_out(self, client: int) -> bool:
        """Whether a client, selected or not, cannot send anything in this round."""

    @property
    def seed(self) -> int:
        """The seed of every random number of the run."""

    @property
    def datamodule(self) -> FederatedDataModule:
        """The data and their partition."""

    @property
    def evaluates_now(self) -> bool:
        """Whether this round ends with an evaluation of the global model."""

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The last value of every scalar, by name."""

    @property
    def metric_values(self) -> dict[str, Tensor]:
        """The last value of every evaluation metric, by name, such as the matrix ``val/confusion_matrix``."""

    @property
    def table_row(self) -> dict[str, str | float | bool]:
        """The settings of trainer, data and model by their keys, flattened: ``model.optimizer.lr``."""

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks of the run, in the order in which they are called."""

    @property
    def loggers(self) -> list[Logger]:
        """The loggers of the run."""

    @property
    def log_dir(self) -> str | None:
        """The folder of the run, the same on every rank; None without loggers."""

    @property
    def state(self) -> TrainerState:
        """Lightning's name for the command and whether it runs, was interrupted, or has finished."""

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this round; a callback may set it, on any rank.

        A callback that sets it in ``on_fit_start`` or ``on_train_start`` of a run that resumes ends that run at once.
        """

    @should_stop.setter
    def should_stop(self, stop: bool) -> None: ...

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""

    @property
    def global_rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add a value to the round's weighted mean of a scalar, over all ranks.

        Args:
            name: The scalar.
            value: A number, or a tensor without dimensions.
            weight: The weight of the value.
        """

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank must call it."""

    def local_data(self, party: int) -> LocalData:
        """What a client, or the server (``sampling.SERVER``), may train on in this round."""

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Count tensors that a client receives (``down``) or sends (``up``) in addition to broadcast and update.

        Args:
            client: The client.
            direction: ``down`` to the client or ``up`` to the server.
            sizes: Bytes of each tensor by its name.
        """

    def save_checkpoint(self, path: str | Path, weights_only: bool | None = None) -> None:
        """Write a checkpoint; every rank must call it, rank 0 writes.

        Args:
            path: The file.
            weights_only: Leave out the clients' states.
        """

    def save_model(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``model.json``; every rank must call it, rank 0 writes."""
