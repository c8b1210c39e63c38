"""The state of one command of a trainer, and the few actions that every part of a command needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.pytorch.trainer.states import TrainerState
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.federation import Direction
from lightning_fedssl.local_training import LocalTraining
from lightning_fedssl.metrics import Counter, MetricCollector
from lightning_fedssl.system import Outcome
from lightning_fedssl.trainer.callback_list import CallbackList
from lightning_fedssl.trainer.evaluation_metrics import MetricFactory, MetricName
from lightning_fedssl.trainer.reporting import Reporting
from lightning_fedssl.trainer.run_folder import RunFolder
from lightning_fedssl.trainer_interface import TrainerInterface

Stage = Literal["fit", "validate", "test", "predict"]

BYTES: dict[Direction, str] = {"down": "communication/download_bytes", "up": "communication/upload_bytes"}
"""The scalar that counts the bytes of each direction."""


@dataclass
class Status:
    """What a trainer can be asked during a command and after it; the next command starts from these values, except fit.

    Attributes:
        round_index: The round, from 1; 0 before the first.
        cohort: The clients of the round, in drawn order.
        participation: What became of each selected client of the last round whose clients trained.
        total_bytes: Bytes that clients received and sent in all rounds.
        should_stop: Whether training ends after this round.
        callback_metrics: The last value of every scalar.
        metric_rounds: The round of the model that ``val`` and ``test`` have evaluated last.
        metric_values: The last value of every evaluation metric, also of those that are matrices.
        predictions: Class probabilities after ``predict``, ``(test images, classes)``.
        predictions_file: The file that they were written to.
        state: Lightning's name for the command, and whether it runs, was interrupted or has finished.
    """

    round_index: int = 0
    cohort: list[int] = field(default_factory=list)
    participation: dict[int, Outcome] = field(default_factory=dict)
    total_bytes: float = 0.0
    should_stop: bool = False
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    metric_rounds: dict[str, int] = field(default_factory=dict)
    metric_values: dict[str, Tensor] = field(default_factory=dict)
    predictions: Tensor | None = None
    predictions_file: str | None = None
    state: TrainerState = field(default_factory=TrainerState)

    def reset(self) -> None:
        """Set everything except ``state`` to what it is before the first round."""
        vars(self).update(vars(Status(state=self.state)))

    def scalars(self) -> dict[str, float]:
        """The last value of every scalar, as numbers."""
        return {name: float(value) for name, value in self.callback_metrics.items()}


@dataclass
class Run:
    """The state of one command on one rank: the first argument of all functions that do a part of its work.

    Attributes:
        trainer: The trainer as callbacks see it; holds the keys of the configuration.
        stage: The command.
        seed: The seed of every random number.
        fabric: Precision, device and ranks.
        algorithm: The algorithm; its module is the working module.
        datamodule: The data and their partition.
        client_optimizer: The optimizer of the clients' steps.
        server_optimizer: The optimizer of the server's steps.
        local_training: Trains the clients of a round.
        hooks: The callbacks.
        folder: The folder of the run and its loggers.
        status: What the trainer reports.
        collector: The weighted means of this round.
        reporting: How many clients are selected, and which of them may drop out or be late.
        shares_server_steps: Whether the ranks divide the batches of the server's training among them.
        quarantine: The trainer's key of that name: a factor above which an update is rejected, or None.
        metrics: Evaluation metrics in addition to loss and accuracy.
        allow_changed: Whether the run may resume with other settings than those of its checkpoint.
        counter: The sums of this round.
        bytes_of_round: What clients received and sent in the last round of this command; None before it.
    """

    trainer: TrainerInterface
    stage: Stage
    seed: int
    fabric: Fabric
    algorithm: FederatedAlgorithm
    datamodule: FederatedDataModule
    client_optimizer: Optimizer
    server_optimizer: Optimizer
    local_training: LocalTraining
    hooks: CallbackList
    folder: RunFolder
    status: Status
    collector: MetricCollector
    reporting: Reporting
    quarantine: float | None = None
    shares_server_steps: bool = False
    metrics: tuple[MetricName | MetricFactory, ...] = ()
    allow_changed: bool = False
    counter: Counter = field(default_factory=Counter)
    bytes_of_round: dict[str, float] | None = None

    @property
    def max_steps(self) -> int | None:
        """Steps per party and phase at most; None for no limit."""
        return 1 if self.trainer.fast_dev_run else None

    @property
    def evaluates_now(self) -> bool:
        """Whether this round ends with an evaluation of the global model, on validation or test images."""
        round_index, every_n = self.status.round_index, self.trainer.check_val_every_n_rounds
        due = self.datamodule.has_validation and round_index % every_n == 0
        return due or round_index == self.trainer.max_rounds

    @property
    def client_lr(self) -> float:
        """The learning rate of the clients' steps: this round's, or the present step's if it changes at every step."""
        return float(self.client_optimizer.param_groups[0]["lr"])

    @property
    def lr_factor(self) -> float:
        """The schedule's larger factor of the learning rate of this round and the next one; at most 1.

        Rates may change within a round. There is no round after the last one.
        """
        round_index, last = self.status.round_index, self.trainer.max_rounds
        rounds = (round_index, min(round_index + 1, last))
        return min(1.0, max(self.algorithm.schedule.checked_factor(each, last) for each in rounds))

    def forget_earlier_run(self) -> None:
        """Reset what all but the model's weights remember of an earlier run; before a checkpoint is loaded."""
        self.status.reset()
        self.hooks.reset()
        self.algorithm.clients.load_state_dict({})
        self.algorithm.server.forget()

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks; its first two arguments are the trainer and the algorithm."""
        self.hooks.call(hook, *arguments)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        return collectives.gather(self.fabric, value)

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add a value to the round's weighted mean of a scalar; one that a client logs counts if it is accepted.

        Args:
            name: The scalar.
            value: A number, or a tensor without dimensions.
            weight: The weight of the value.
        """
        self.collector.update(name, value, weight, self.algorithm.clients.staging)

    def local_data(self, party: int) -> LocalData:
        """What a client or the server may train on in this round."""
        return self.datamodule.local_data(party, self.status.round_index, self.trainer.dtype)

    def drops_out(self, client: int) -> bool:
        """Whether a client cannot send anything in this round."""
        availability = self.reporting.availability
        return availability is not None and availability.drops_out(self.seed, self.status.round_index, client)

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Count tensors that the server and a client exchange, and report them to the callbacks.

        Args:
            client: The client.
            direction: ``down`` to the client or ``up`` to the server.
            sizes: Bytes of each tensor by its name.
        """
        self.counter.add(BYTES[direction], sum(sizes.values()))
        self.call("on_transfer", client, direction, sizes)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Give the scalars of a round or an evaluation to the loggers and to ``callback_metrics``."""
        self.status.callback_metrics.update(as_tensors(metrics))
        evaluated = {"val", "test"} & {name.partition("/")[0] for name in metrics}
        self.status.metric_rounds |= dict.fromkeys(sorted(evaluated), self.status.round_index)
        self.folder.log_metrics(metrics, self.status.round_index)


def as_tensors(metrics: Mapping[str, float]) -> dict[str, Tensor]:
    """Scalars as Lightning's callbacks expect them."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
