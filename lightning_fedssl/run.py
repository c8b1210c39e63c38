"""A run as a value, the keys of its trainer, and what callbacks may ask of the trainer."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
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

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.local_training import ClientsAtOnce, LocalTraining
from lightning_fedssl.metrics.evaluation import EvaluationMetrics
from lightning_fedssl.metrics.rounds import Metrics, Scalars
from lightning_fedssl.round import Round
from lightning_fedssl.storage.run_folder import RunFolder
from lightning_fedssl.system import Faults, Outcome, SystemModel


class Settings:
    """The keys of a trainer, under the same names; they do not change once it is made.

    It is not a dataclass, because the command line would take a trainer for a group of keys.

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

    def describe_privacy(self) -> dict[str, Any] | None:
        """What the run guarantees so far; None without differential privacy."""
        return next(filter(None, (rule.describe() for rule in self.updates)), None)


@dataclass(eq=False)
class Run:
    """What the loop over rounds works on: four owners, and the values of the present command.

    An evaluation needs no trainer: whoever sets the method, the data and the optimizers can call
    the functions of the loop with it. Rules and callbacks get ``hooks.trainer``.

    Attributes:
        settings: The keys of the trainer.
        hooks: Calls the callbacks.
        scalars: What the round collects, and the last value of every scalar.
        folder: Where the run is written, and its loggers.
        state: Lightning's name for the command, and whether it runs, was interrupted or has
            finished.
        seed: The seed of every random number of the run.
        ckpt_path: The checkpoint that the command resumes or evaluates; None if there is none.
        loaded_round: The round of that checkpoint, once it is loaded.
        round: The present round; before the first it has the index 0, or that of the checkpoint
            that the run resumes. The method has it too, as ``current_round``.
        participation: What became of each selected client, in drawn order, the same on every rank.
            Of this round from ``on_global_model`` on, before that of the round before. Empty if no
            client was trained.
        step_work: With ``system``, what a step of each client of this rank computes, in plain
            steps.
        should_stop: Whether the run ends after this round.
        stopped_by: The number of the signal that has ended the run after a round; 0 for none.
        fabric: Precision, device and ranks.
        algorithm: The algorithm of the command; its module is the working module.
        datamodule: The data and their partition.
        client_optimizer: The optimizer of the clients' steps.
        server_optimizer: The optimizer of the server's steps.
        local_training: Trains the clients of a round.
        metrics: The metrics of evaluations.
        described: The settings that affect results, by key: what a checkpoint and a table of runs
            hold (:func:`~lightning_fedssl.trainer.settings.settings_of`).
    """

    settings: Settings
    hooks: Hooks
    scalars: Scalars
    folder: RunFolder
    state: TrainerState = field(default_factory=TrainerState)
    seed: int = 0
    ckpt_path: Path | None = None
    loaded_round: int = 0
    round: Round = field(default_factory=Round)
    participation: Mapping[int, Outcome] = field(default_factory=dict)
    step_work: dict[int, float] = field(default_factory=dict)
    should_stop: bool = False
    stopped_by: int = 0
    fabric: Fabric = field(init=False)
    algorithm: FederatedAlgorithm = field(init=False)
    datamodule: FederatedDataModule = field(init=False)
    client_optimizer: Optimizer = field(init=False)
    server_optimizer: Optimizer = field(init=False)
    local_training: LocalTraining = field(init=False)
    metrics: EvaluationMetrics = field(init=False)
    described: dict[str, Any] = field(init=False)

    def reset(self) -> None:
        """Set what callbacks can read to what it is before the first round."""
        self.round = Round()
        self.participation = {}
        self.step_work = {}
        self.scalars.reset()
        self.should_stop = False
        self.stopped_by = 0

    @property
    def clients_per_round(self) -> int:
        """Clients whose updates a round uses; where the key is left out, 10 or all of fewer."""
        configured, data = self.settings.given_clients_per_round, vars(self).get("datamodule")
        return configured or (10 if data is None else min(10, data.num_clients))

    @property
    def cohort_size(self) -> int:
        """Clients drawn in a round; ``fast_dev_run`` draws two."""
        number = self.clients_per_round
        return min(number, 2) if self.settings.fast_dev_run else number

    @property
    def evaluates_now(self) -> bool:
        """Whether this round ends with an evaluation of the global model, on validation or test
        images.
        """
        index = self.round.index
        every = self.settings.check_val_every_n_rounds
        due = self.datamodule.has_validation and index % every == 0
        return due or index == self.settings.max_rounds

    @property
    def client_lr(self) -> float:
        """The learning rate of the clients' steps: this round's, or the present step's if it
        changes at every step.
        """
        return float(self.client_optimizer.param_groups[0]["lr"])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank must call it."""
        return collectives.gather(self.fabric, value)

    def local_data(self, party: int) -> LocalData:
        """What a client, or the server (``sampling.SERVER``), may train on in this round."""
        return self.datamodule.local_data(party, self.round.index, self.settings.dtype)

    def log_metrics(self, metrics: Metrics) -> None:
        """Give scalars of a round or an evaluation to the loggers and ``callback_metrics``."""
        self.scalars.publish(metrics, self.round.index)
        self.folder.log_metrics(metrics, self.round.index)


def _at(place: str) -> Any:
    """An attribute of a trainer that shows one of its run's, such as ``run.round.index``."""
    return property(attrgetter(place))


class TrainerView(Settings, ABC):
    """What hooks get as ``trainer``: the keys of the trainer under their names, what callbacks may
    read of the run, and what they may do.

    They change the run by the functions of this class, or by ``should_stop``.

    Attributes:
        run: The run. What is not described here has the name that it has there
            (:class:`Run`).
        round_index: The number of the present round, from 1.
        cohort: The clients of the present round, in drawn order, the same on every rank.
        callbacks: The callbacks of the run, in the order in which they are called.
        callback_metrics: The last value of every scalar, by name.
        total_bytes: Bytes that clients received and sent in all rounds.
        is_global_zero: Whether this is rank 0, which alone writes files and prints.
        global_rank: The number of this rank, from 0.
        world_size: The number of ranks.
        loggers: The loggers of the run.
        log_dir: The folder of the run, the same on every rank once the run has begun; None without
            loggers.
        predictions: Class probabilities of the last ``predict``, ``(test images, classes)``.
        predictions_file: The file that they were written to.
    """

    run: Run
    predictions: Tensor | None = None
    predictions_file: str | None = None

    seed: int = _at("run.seed")
    algorithm: FederatedAlgorithm = _at("run.algorithm")
    datamodule: FederatedDataModule = _at("run.datamodule")
    client_optimizer: Optimizer = _at("run.client_optimizer")
    ckpt_path: Path | None = _at("run.ckpt_path")
    state: TrainerState = _at("run.state")
    stopped_by: int = _at("run.stopped_by")
    round: Round = _at("run.round")
    round_index: int = _at("run.round.index")
    cohort: Sequence[int] = _at("run.round.cohort")
    participation: Mapping[int, Outcome] = _at("run.participation")
    clients_per_round: int = _at("run.clients_per_round")
    cohort_size: int = _at("run.cohort_size")
    evaluates_now: bool = _at("run.evaluates_now")
    callbacks: list[Callback] = _at("run.hooks.callbacks")
    callback_metrics: dict[str, Tensor] = _at("run.scalars.last")
    total_bytes: float = _at("run.scalars.total_bytes")
    fabric: Fabric = _at("run.fabric")
    is_global_zero: bool = _at("run.fabric.is_global_zero")
    global_rank: int = _at("run.fabric.global_rank")
    world_size: int = _at("run.fabric.world_size")
    loggers: list[Logger] = _at("run.folder.loggers")
    log_dir: str | None = _at("run.folder.log_dir")
    gather: Callable[[Any], list[Any]] = _at("run.gather")
    local_data: Callable[[int], LocalData] = _at("run.local_data")
    log_metrics: Callable[[Metrics], None] = _at("run.log_metrics")

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this round; a callback may set it, on any rank.

        A callback that sets it in ``on_fit_start`` or ``on_train_start`` of a run that resumes ends
        that run at once.
        """
        return self.run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.run.should_stop = value

    @property
    def training(self) -> bool:
        """Whether the command is ``fit``."""
        return self.state.stage == RunningStage.TRAINING

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended the command."""
        return self.state.status == TrainerStatus.INTERRUPTED

    # What callbacks may do.

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add a value to the round's weighted mean of a scalar, over all ranks.

        A client's counts if it is accepted.

        Args:
            name: The scalar.
            value: A number, or a tensor without dimensions.
            weight: The weight of the value.
        """
        self.algorithm.log(name, value, batch_size=weight)

    def drops_out(self, client: int) -> bool:
        """Whether a client, selected or not, cannot send anything in this round."""
        return self.faults.drops_out(self.seed, self.round.index, client)

    def print(self, *values: Any) -> None:
        """Print above the progress bar, on rank 0."""
        if self.is_global_zero:
            tqdm.write(" ".join(map(str, values)))
            sys.stdout.flush()

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

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
        self, folder: str, steps: int | None = None, rows: Tensor | None = None
    ) -> Beside:
        """Train what the run is compared with, on this rank by itself: the best linear answer to
        the labels.

        Args:
            folder: Where the checkpoints are written.
            steps: The steps that the server has made in the run. If given, the run's network is
                trained on the labels alone, in as many rounds as the run has had.
            rows: Labels, by their place among the server's. If given, the run's method is trained
                once more, on these labels and the clients' samples.
        """


class Beside(NamedTuple):
    """What became of a training beside that of a run.

    Attributes:
        metrics: The last scalars; without those of the test if a signal ended the training.
        trained: The method, with its network.
    """

    metrics: Metrics
    trained: FederatedAlgorithm
