"""The state of a run, and what callbacks and the parts of a trainer may ask of it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerState, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.local_training import ClientsAtOnce, LocalTraining
from lightning_fedssl.metrics.rounds import Metrics, Scalars
from lightning_fedssl.round import Round
from lightning_fedssl.state import Direction
from lightning_fedssl.storage.run_folder import RunFolder
from lightning_fedssl.system import Faults, Outcome, SystemModel

BYTES: dict[Direction, str] = {
    "down": "communication/download_bytes",
    "up": "communication/upload_bytes",
}
"""The scalar that counts the bytes of each direction."""


class Settings:
    """The keys of a trainer, under the same names; they do not change once it is made.

    It is no dataclass, because the command line would take a trainer for a group of keys.

    Args:
        keys: All of the following by name.

    Attributes:
        given_clients_per_round: The key ``clients_per_round``; None if it is left out.
        dtype: The type of the weights and of the images that the network receives, by
            ``precision``.
        updates: The rules for the clients' updates.
    """

    max_rounds: int
    given_clients_per_round: int | None
    clients_at_once: ClientsAtOnce
    precision: str
    dtype: torch.dtype
    channels_last: bool
    system: SystemModel | None
    faults: Faults
    metrics: Sequence[Any]
    check_val_every_n_rounds: int
    fast_dev_run: bool
    deterministic: bool | Literal["warn"]
    allow_changed: bool
    enable_progress_bar: bool
    default_root_dir: str
    updates: list[Any]

    def __init__(self, **keys: Any) -> None:
        vars(self).update(keys)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Settings.__annotations__:
            raise AttributeError(f"trainer.{name} cannot change: make another trainer")
        super().__setattr__(name, value)

    @property
    def max_steps(self) -> int | None:
        """Steps per party and phase at most; None for no limit."""
        return 1 if self.fast_dev_run else None


class Run(Settings, ABC):
    """A run, as callbacks and the parts of the trainer see it.

    It is what hooks get as ``trainer``. :class:`~lightning_fedssl.FederatedTrainer` derives from
    it: it takes the keys and has the commands, and it alone sets the attributes below. Others read
    them, and change the run by the functions of this class, or by ``should_stop``.

    The keys of the trainer are attributes of the same names.

    Attributes:
        fabric: Precision, device and ranks.
        seed: The seed of every random number of the run.
        algorithm: The algorithm of the command; its module is the working module.
        datamodule: The data and their partition.
        hooks: Calls the callbacks.
        ckpt_path: The checkpoint that the command resumes or evaluates; None if there is none.
        round: The present round; before the first it has the index 0, or that of the checkpoint
            that the run resumes.
        participation: What became of each selected client, in drawn order, the same on every rank.
            Of this round from ``on_global_model`` on, before that of the round before. Empty if no
            client was trained.
        step_work: With ``system``, what a step of each client of this rank computes, in plain
            steps.
        should_stop: Whether the run ends after this round; a callback may set it, on any rank. A
            callback that sets it in ``on_fit_start`` or ``on_train_start`` of a run that resumes
            ends that run at once.
        stopped_by: The number of the signal that has ended the run after a round; 0 for none.
        predict_shares: How frequent the classes are among the images of ``predict``, if known.
        predictions: Class probabilities of the last ``predict``, ``(test images, classes)``.
        predictions_file: The file that they were written to.
        state: Lightning's name for the command, and whether it runs, was interrupted or has
            finished.
        client_optimizer: The optimizer of the clients' steps.
        server_optimizer: The optimizer of the server's steps.
        local_training: Trains the clients of a round.
        scalars: What the round collects, and the last value of every scalar.
    """

    fabric: Fabric
    seed: int
    predict_shares: Mapping[str, Any] | None = None
    algorithm: FederatedAlgorithm
    datamodule: FederatedDataModule
    hooks: Hooks
    ckpt_path: Path | None
    folder: RunFolder
    state: TrainerState
    client_optimizer: Optimizer
    server_optimizer: Optimizer
    local_training: LocalTraining
    scalars: Scalars

    def reset(self) -> None:
        """Set what callbacks can read to what it is before the first round."""
        self.round = Round()
        self.participation: Mapping[int, Outcome] = {}
        self.step_work: dict[int, float] = {}
        self.scalars.reset()
        self.should_stop = False
        self.stopped_by = 0
        self.predictions: Tensor | None = None
        self.predictions_file: str | None = None

    # What changes in a run.

    def enter(self, new: Round) -> None:
        """Make a round the present one."""
        self.round = self.algorithm.current_round = new

    def took_part(self, outcomes: Mapping[int, Outcome]) -> None:
        """Publish what became of the clients of the round."""
        self.participation = outcomes

    @property
    def training(self) -> bool:
        """Whether the command is ``fit``."""
        return self.state.stage == RunningStage.TRAINING

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended the command."""
        return self.state.status == TrainerStatus.INTERRUPTED

    def interrupt(self, number: int) -> None:
        """Note that a signal of this number ends the command."""
        self.state.status = TrainerStatus.INTERRUPTED
        self.stopped_by = number

    # What callbacks and the parts of the trainer may do.

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add a value to the round's weighted mean of a scalar, over all ranks.

        A client's counts if it is accepted.

        Args:
            name: The scalar.
            value: A number, or a tensor without dimensions.
            weight: The weight of the value.
        """
        self.scalars.log(name, value, weight, self.algorithm.clients.staging)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank must call it."""
        return collectives.gather(self.fabric, value)

    def local_data(self, party: int) -> LocalData:
        """What a client, or the server (``sampling.SERVER``), may train on in this round."""
        return self.datamodule.local_data(party, self.round_index, self.dtype)

    def draw_cohort(self, index: int) -> list[int]:
        """The clients of a round, in drawn order, the same on every rank.

        Args:
            index: The round.
        """
        for rule in self.updates:
            if (drawn := rule.draw_cohort(self, index)) is not None:
                return list(drawn)
        return sampling.cohort(self.seed, index, self.datamodule.num_clients, self.cohort_size)

    def describe_privacy(self) -> dict[str, Any] | None:
        """What the run guarantees so far; None without differential privacy."""
        for rule in self.updates:
            if found := rule.describe():
                return dict(found)
        return None

    def drops_out(self, client: int) -> bool:
        """Whether a client, selected or not, cannot send anything in this round."""
        availability = self.faults.availability
        return availability is not None and availability.drops_out(
            self.seed, self.round_index, client
        )

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Count tensors that a client receives (``down``) or sends (``up``), and report them to the
        callbacks.

        Args:
            client: The client.
            direction: ``down`` to the client or ``up`` to the server.
            sizes: Bytes of each tensor by its name.
        """
        self.scalars.count(BYTES[direction], sum(sizes.values()))
        self.hooks.call("on_transfer", client, direction, sizes)

    def log_metrics(self, metrics: Metrics) -> None:
        """Give the scalars of a round or an evaluation to the loggers and to
        ``callback_metrics``.
        """
        self.scalars.publish(metrics, self.round_index)
        self.folder.log_metrics(metrics, self.round_index)

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks of the run, in the order in which they are called."""
        return self.hooks.callbacks

    # Scalars.

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The last value of every scalar, by name."""
        return self.scalars.last

    @property
    def metric_values(self) -> dict[str, Tensor]:
        """The last value of every evaluation metric, by name, such as the matrix
        ``val/confusion_matrix``.
        """
        return self.scalars.metrics

    @property
    def metric_rounds(self) -> dict[str, int]:
        """The round of the model that ``val`` and ``test`` have evaluated last."""
        return self.scalars.rounds

    @property
    def total_bytes(self) -> float:
        """Bytes that clients received and sent in all rounds."""
        return self.scalars.total_bytes

    # What follows from the keys and the round.

    @property
    def round_index(self) -> int:
        """The number of the present round, from 1."""
        return self.round.index

    @property
    def cohort(self) -> Sequence[int]:
        """The clients of the present round, in drawn order, the same on every rank."""
        return self.round.cohort

    @property
    def clients_per_round(self) -> int:
        """Clients whose updates a round uses; where the key is left out, 10 or all of fewer."""
        if self.given_clients_per_round is not None:
            return self.given_clients_per_round
        data = vars(self).get("datamodule")
        return 10 if data is None else min(10, data.num_clients)

    @property
    def cohort_size(self) -> int:
        """Clients drawn in a round; ``fast_dev_run`` draws two."""
        return min(self.clients_per_round, 2) if self.fast_dev_run else self.clients_per_round

    @property
    def evaluates_now(self) -> bool:
        """Whether this round ends with an evaluation of the global model, on validation or test
        images.
        """
        due = (
            self.datamodule.has_validation and self.round_index % self.check_val_every_n_rounds == 0
        )
        return due or self.round_index == self.max_rounds

    @property
    def client_lr(self) -> float:
        """The learning rate of the clients' steps: this round's, or the present step's if it
        changes at every step.
        """
        return float(self.client_optimizer.param_groups[0]["lr"])

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
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The folder of the run, the same on every rank once the run has begun; None without
        loggers.
        """
        return self.folder.log_dir

    def print(self, *values: Any) -> None:
        """Print above the progress bar, on rank 0."""
        if self.is_global_zero:
            tqdm.write(" ".join(map(str, values)))
            sys.stdout.flush()

    # What the trainer does for callbacks.

    @property
    @abstractmethod
    def table_row(self) -> dict[str, str | float | bool]:
        """The settings of trainer, data and model by their keys, flattened:
        ``model.optimizer.lr``.
        """

    @abstractmethod
    def save_checkpoint(
        self, path: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, completely or not at all; every rank must call it, rank 0 writes.

        Args:
            path: The file.
            weights_only: Leave out the clients' states, such as their optimizers' momentum. A run
                whose clients have states cannot be resumed from such a checkpoint, so it lacks
                the state of the server's optimizer, too.
            storage_options: Accepted for Lightning's callbacks and not used.
        """

    @abstractmethod
    def save_model(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``model.json``; every rank must call it, rank 0 writes.

        Args:
            folder: The folder; it is made.
        """

    @abstractmethod
    def train_beside(
        self, folder: str, steps: int | None = None, places: Tensor | None = None
    ) -> Beside:
        """Train what the run is compared with, on this rank by itself: the best linear answer to
        the labels.

        Args:
            folder: Where the checkpoints are written.
            steps: In place of it the run's network on the labels alone, in as many rounds as the
                run has had; the steps of the server in the run.
            places: In place of it the run's method once more, on these labels of the server's and
                the clients' samples.
        """


class Beside(NamedTuple):
    """What became of a training beside that of a run.

    Attributes:
        metrics: The last scalars; without those of the test if a signal ended the training.
        trained: The method, with its network.
    """

    metrics: Metrics
    trained: FederatedAlgorithm
