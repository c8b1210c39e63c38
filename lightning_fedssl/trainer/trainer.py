"""The federated trainer: its keys, its commands, and what callbacks may ask of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.local_training import LocalTraining, stack_size
from lightning_fedssl.metrics import Counter, MetricCollector, as_tensors
from lightning_fedssl.robust.aggregators import Aggregator
from lightning_fedssl.robust.attacks import Attack
from lightning_fedssl.state import Direction, ServerState, frozen_state, load_state
from lightning_fedssl.system import Faults, Outcome, SystemModel
from lightning_fedssl.trainer import (
    callback_list,
    checkpointing,
    evaluation,
    fit_loop,
    launch,
    setup,
)
from lightning_fedssl.trainer.evaluation_metrics import MetricFactory, MetricName
from lightning_fedssl.trainer.federation import Federation
from lightning_fedssl.trainer.privacy import CentralDP
from lightning_fedssl.trainer.run_folder import RunFolder
from lightning_fedssl.trainer.settings import table_row_of

_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
_STATES: dict[str, tuple[TrainerFn, RunningStage]] = {
    "fit": (TrainerFn.FITTING, RunningStage.TRAINING),
    "validate": (TrainerFn.VALIDATING, RunningStage.VALIDATING),
    "test": (TrainerFn.TESTING, RunningStage.TESTING),
    "predict": (TrainerFn.PREDICTING, RunningStage.PREDICTING),
}

_LIGHTNINGS_KEYS = {
    "max_epochs": "max_rounds, the number of rounds",
    "max_steps": "max_rounds, and the method's client_epochs or client_steps",
    "check_val_every_n_epoch": "check_val_every_n_rounds",
    "gradient_clip_val": "gradient_clip_norm to the method",
}
"""Keys of Lightning's trainer, and what to give instead."""

BYTES: dict[Direction, str] = {
    "down": "communication/download_bytes",
    "up": "communication/upload_bytes",
}
"""The scalar that counts the bytes of each direction."""


class _NamesKeys(type):
    """Refuses keys of Lightning's trainer that have other names here.

    The command line reads the constructor alone.
    """

    def __call__(cls, *arguments: Any, **keys: Any) -> Any:
        if wrong := [key for key in keys if key in _LIGHTNINGS_KEYS]:
            raise TypeError(
                f"FederatedTrainer has no {wrong[0]}: give {_LIGHTNINGS_KEYS[wrong[0]]}"
            )
        return super().__call__(*arguments, **keys)


class FederatedTrainer(metaclass=_NamesKeys):
    """Simulates a federation: draws the clients of each round, lets the algorithm train, evaluates,
    logs and saves.

    Args:
        max_rounds: T, rounds of the whole run.
        clients_per_round: Clients drawn in a round (C * M in the papers); left out: 10, or all if
            there are fewer.
        clients_at_once: Clients stacked on one device (vectorized training); 1 trains them one
            after another. ``auto``: 1 on a CPU, on a GPU as many as fit into its memory. On a CPU
            the clients of a round are divided into as few stacks as possible, each of which one
            process trains. In split learning (Semi-SFL) it is the number of clients whose parts of
            the network are stacked; there ``auto`` is all clients on a GPU.
        accelerator: ``cpu``, ``gpu``, ``auto``, ... as in Lightning.
        devices: Number or list of devices on a node; each trains its share of a round's clients.
            Left out: one; the command ``fit`` on the command line takes ``auto`` on a CPU.
            ``auto``: all GPUs; on a CPU as many processes as there are cores to use (with
            OMP_NUM_THREADS set, cores for that many threads each), but no more than a round has
            clients, or stacks. The result is bitwise that of one process.
        strategy: ``ddp``, ``ddp_fork``, ``ddp_spawn``, ... of Fabric: how several devices are run.
            ``auto``: ddp; on a CPU under Linux ``ddp_fork``: the processes exist for one command
            and report the model and the scalars to the process that called it.
        precision: As in Fabric: ``32-true``; ``bf16-mixed`` or ``16-mixed`` (GPU) for 16-bit
            arithmetic on 32-bit weights; ``64-true`` for 64-bit everything.
        tf32: On an NVIDIA GPU, multiply the 32-bit numbers of convolutions and matrix products with
            10 bits after the binary point (TF32), which is up to eight times as fast. False: with
            all 23.
        channels_last: Store convolutions' weights and images with the channels last: faster
            kernels, the same numbers up to rounding.
        callbacks: Callbacks in addition to those that the algorithm needs. A callback of the same
            class replaces the algorithm's.
        system: Speeds of simulated devices and links; the simulated time of the run is logged as
            ``system/*``.
        faults: Clients that drop out or are late: ``availability``, ``deadline_s``,
            ``over_selection`` (:class:`~lightning_fedssl.system.Faults`).
        quarantine: Reject a client's update that moved the weights by more than this many times the
            round's median movement, and by more than the weights' own norm (with at least 3 valid
            updates in the round): an update that has exploded. It is logged with its client and
            counted as ``client/refused``. null accepts every valid update. A movement begins at the
            weights that the client received: the global weights, or, with FedRGD, EASGD and Overlap
            Local-SGD, those of its group or slot. The weights' own norm is the norm of these
            weights, times the schedule's factor of the learning rate.
        aggregator: A robust rule that combines the clients' updates in place of the mean:
            ``Median``, ``TrimmedMean``, ``Krum``, ``MultiKrum``, ``GeometricMedian``, or a subclass
            of ``Aggregator``.
        attack: A share of the clients attacks: ``SignFlip``, ``ScaledUpdate``, ``GaussianUpdate``,
            ``ALIE``, ``LabelFlip``, ``PseudoLabelPoison``, or a subclass of ``Attack``.
        privacy: Differential privacy for clients: :class:`~lightning_fedssl.trainer.CentralDP`,
            which clips updates and adds noise to their sum.
        logger: ``null`` or ``true``: TensorBoard and CSV below ``default_root_dir``, in a new
            folder for every ``fit``; ``false``: none; or loggers of your own, which keep their
            folder. Without a logger the checkpoints are in ``checkpoints`` below
            ``default_root_dir``, where a new run replaces an earlier one's.
        metrics: Metrics in addition to loss and accuracy: ``macro_f1``, ``recall`` (per class),
            ``auroc``, ``calibration_error``, ``confusion_matrix``, or the class of any metric of
            torchmetrics or of your own. ``num_classes`` is filled in from the data. A metric ``M``
            is logged as ``val/m`` and ``test/m``.
        check_val_every_n_rounds: Evaluate on the validation images every n rounds, and in the last
            one.
        fast_dev_run: A test of the configuration: one round with two clients and one step each; no
            files are written.
        deterministic: Use deterministic kernels only (as PyTorch's
            ``use_deterministic_algorithms``).
        allow_changed: Let a run resume with other settings or data than its checkpoint's, and let a
            checkpoint be evaluated on data with other class names or another normalisation;
            otherwise an error names what differs.
        enable_progress_bar: Print one line per round, and the result.
        default_root_dir: Where runs are written; the current folder if left out.

    Attributes:
        fabric: Precision, device and ranks.
        dtype: The type of the weights and of the images that the network receives.
        seed: The seed of every random number of the run.
        algorithm: The algorithm of the command; its module is the working module.
        datamodule: The data and their partition.
        callbacks: The callbacks of the run, in the order in which they are called.
        listeners: By the name of each hook, the callbacks that override it.
        ckpt_path: The checkpoint that the command resumes or evaluates; None if there is none.
        round_index: The round, from 1; before the first 0, or the round of the checkpoint that the
            run resumes.
        cohort: The clients of this round, in drawn order, the same on every rank.
        participation: What became of each selected client, in drawn order, the same on every rank.
            Of this round from ``on_global_model`` on, before that of the round before. Empty if no
            client was trained.
        step_work: With ``system``, what a step of each client of this rank computes, in plain
            steps.
        total_bytes: Bytes that clients received and sent in all rounds.
        should_stop: Whether the run ends after this round; a callback may set it, on any rank. A
            callback that sets it in ``on_fit_start`` or ``on_train_start`` of a run that resumes
            ends that run at once.
        stopped_by: The number of the signal that has ended the run after a round; 0 for none.
        callback_metrics: The last value of every scalar, by name.
        metric_values: The last value of every evaluation metric, by name, such as the matrix
            ``val/confusion_matrix``.
        metric_rounds: The round of the model that ``val`` and ``test`` have evaluated last.
        predictions: Class probabilities of the last ``predict``, ``(test images, classes)``.
        predictions_file: The file that they were written to.
        state: Lightning's name for the command, and whether it runs, was interrupted or has
            finished.
        client_optimizer: The optimizer of the clients' steps.
        server_optimizer: The optimizer of the server's steps.
        local_training: Trains the clients of a round.
        collector: The weighted means of this round.
        counter: The sums of this round.
        lr_factor: The schedule's larger factor of the learning rate of this round and the next one;
            at most 1.
        bytes_of_round: What clients received and sent in the last round of this command; None
            before it.
    """

    seed: int
    algorithm: FederatedAlgorithm
    datamodule: FederatedDataModule
    client_optimizer: Optimizer
    server_optimizer: Optimizer
    local_training: LocalTraining
    collector: MetricCollector
    counter: Counter
    lr_factor: float
    bytes_of_round: dict[str, float] | None

    # Lightning's callbacks read these.
    sanity_checking = False
    val_check_interval = 1.0
    num_val_batches = (1,)
    received_sigterm = False

    def __init__(
        self,
        *,
        max_rounds: int = 100,
        clients_per_round: int | None = None,
        clients_at_once: int | Literal["auto"] = "auto",
        accelerator: str = "auto",
        devices: int | list[int] | str | None = None,
        strategy: str | Strategy = "auto",
        precision: str = "32-true",
        tf32: bool = True,
        channels_last: bool = False,
        callbacks: Callback | list[Callback] | None = None,
        system: SystemModel | None = None,
        faults: Faults | None = None,
        quarantine: float | None = 10.0,
        aggregator: Aggregator | None = None,
        attack: Attack | None = None,
        privacy: CentralDP | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        metrics: Sequence[MetricName | MetricFactory] = (),
        check_val_every_n_rounds: int = 1,
        fast_dev_run: bool = False,
        deterministic: bool = False,
        allow_changed: bool = False,
        enable_progress_bar: bool = True,
        default_root_dir: str | Path | None = None,
    ) -> None:
        self.draws_all_of_few = clients_per_round is None
        clients_per_round = 10 if clients_per_round is None else clients_per_round
        self.max_rounds = 1 if fast_dev_run else max_rounds
        self.clients_per_round = clients_per_round
        self.clients_at_once = clients_at_once
        self.precision = precision
        self.dtype = _DTYPES.get(precision, torch.float32)
        self.tf32 = tf32
        self.channels_last = channels_last
        self.system = system
        self.faults = faults or Faults()
        self.quarantine = quarantine
        self.aggregator = aggregator
        self.attack = attack
        self.privacy = privacy
        self.metrics = tuple(metrics)
        self.check_val_every_n_rounds = check_val_every_n_rounds
        self.fast_dev_run = fast_dev_run
        self.deterministic = deterministic
        self.allow_changed = allow_changed
        self.enable_progress_bar = enable_progress_bar
        self.default_root_dir = str(default_root_dir or Path.cwd())
        self._check_settings()
        stacks = math.ceil(self.cohort_size / stack_size(clients_at_once))
        self.fabric = launch.make_fabric(accelerator, devices, strategy, precision, stacks)
        self.given_callbacks = callback_list.usable(callback_list.as_list(callbacks))
        self.set_callbacks(self.given_callbacks)
        self.folder = RunFolder(logger, writes=not fast_dev_run)
        self.ckpt_path: Path | None = None
        self.state = TrainerState()
        self.make_federation: Callable[[FederatedTrainer], Federation] = Federation
        self._ranks_exist = False
        self.reset()

    def _check_settings(self) -> None:
        """Refuse values that a configuration's types cannot."""
        for key in (
            "max_rounds",
            "clients_per_round",
            "check_val_every_n_rounds",
            "clients_at_once",
        ):
            value = getattr(self, key)
            if not (isinstance(value, Integral) and int(value) >= 1) and (key, value) != (
                "clients_at_once",
                "auto",
            ):
                raise ValueError(f"trainer.{key} is {value}: give a whole number of at least 1")
        if self.quarantine is not None and not self.quarantine > 1:
            raise ValueError(
                f"trainer.quarantine is {self.quarantine}: give a factor above 1, or null to "
                "accept every update"
            )
        if self.faults.deadline_s is not None and self.system is None:
            raise ValueError(
                "trainer.faults.deadline_s needs trainer.system, which says how long a client "
                "takes: set it to a "
                "SystemModel, or leave the deadline out"
            )

    def reset(self) -> None:
        """Set what callbacks can read to what it is before the first round."""
        self.round_index = 0
        self.cohort: list[int] = []
        self.participation: Mapping[int, Outcome] = {}
        self.step_work: dict[int, float] = {}
        self.total_bytes = 0.0
        self.should_stop = False
        self.stopped_by = 0
        self.callback_metrics: dict[str, Tensor] = {}
        self.metric_values: dict[str, Tensor] = {}
        self.metric_rounds: dict[str, int] = {}
        self.predictions: Tensor | None = None
        self.predictions_file: str | None = None

    def set_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Call the hooks of these callbacks from now on, in this order."""
        self.callbacks = list(callbacks)
        hooks = [
            "setup",
            "teardown",
            *(name for name in dir(FederatedCallback) if name.startswith("on_")),
        ]
        self.listeners = {
            hook: [c for c in callbacks if callback_list.overrides(c, hook)] for hook in hooks
        }

    # The commands.

    def fit(
        self,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train for ``max_rounds`` rounds, then test the last model.

        SIGINT or SIGTERM ends the run after its round, without a test; see ``stopped_by``. A second
        one, or one before the first round, raises KeyboardInterrupt or SystemExit at once.

        Args:
            model: The algorithm.
            datamodule: The data and their partition.
            ckpt_path: The checkpoint to resume: a path, or ``last`` or ``best`` of the newest run
                below ``default_root_dir``.
        """
        self._run("fit", model, datamodule, ckpt_path)

    def validate(
        self,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate on the validation images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the current model
                if left out.
        """
        return self._run("validate", model, datamodule, ckpt_path)

    def test(
        self,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate on the test images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the current model
                if left out.
        """
        return self._run("test", model, datamodule, ckpt_path)

    def predict(
        self,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        ckpt_path: str | Path | None = None,
    ) -> Tensor | None:
        """Class probabilities of the test images, or of the new images in ``data.predict_root``.

        They are written to ``predictions.csv`` in the run folder, with class names, and file names
        of new images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to use: a path, ``last`` or ``best``; the current model if
                left out.

        Returns:
            ``(images, classes)``.
        """
        self._run("predict", model, datamodule, ckpt_path)
        return self.predictions

    def _run(
        self,
        stage: str,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        ckpt_path: str | Path | None,
    ) -> dict[str, float]:
        """Run a command on all ranks."""
        setup.refuse_other_classes(model, datamodule)
        self.ckpt_path = checkpointing.find(ckpt_path, Path(self.default_root_dir))
        self.algorithm, self.datamodule = model, datamodule
        if launch.forks(
            self.fabric
        ):  # the ranks share the memory of the data, and a refusal is raised once
            setup.read_data(datamodule, stage)
            setup.refuse_unsuitable_data(self, stage)
        arguments, launched = (
            (self, stage, model, datamodule),
            cast(Callable[..., Any], self.fabric.launch),
        )
        with (
            launch.settings(self.fabric.device, self.deterministic, self.tf32),
            launch.report() as report,
        ):
            with report.expected():
                metrics: dict[str, float] = (
                    run_command(self.fabric, *arguments, report)
                    if self._ranks_exist  # since an earlier command of this script
                    else launched(run_command, *arguments, report)
                )
            outcome = report.outcome()
        if outcome is None:
            self._ranks_exist = True
        else:
            self._adopt(stage, model, datamodule, outcome)
        return metrics

    def outcome(self) -> dict[str, Any]:
        """What a command leaves in this trainer, as tensors and plain values.

        See :meth:`_adopt`.
        """
        model = self.algorithm
        return {
            "model": {**frozen_state(model), **model.server.model()},
            "round_index": self.round_index,
            "total_bytes": self.total_bytes,
            "stopped_by": self.stopped_by,
            "participation": dict(self.participation),
            "predictions": self.predictions,
            "predictions_file": self.predictions_file,
            "callback_metrics": self.callback_metrics,
            "metric_values": self.metric_values,
            "metric_rounds": self.metric_rounds,
            "origin": dict(model.origin),
            "log_dir": self.log_dir,
            "status": self.state.status.value,
            "callbacks": checkpointing.states_of(self.callbacks),
        }

    def _adopt(
        self,
        stage: str,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        outcome: dict[str, Any],
    ) -> None:
        """Take over the outcome of other processes, which had copies of the trainer and the
        algorithm.
        """
        self.seed, self.algorithm, self.datamodule = sampling.global_seed(), model, datamodule
        setup.read_data(datamodule, stage)
        setup.build_model(model, datamodule)
        model.to(self.dtype)
        load_state(model, outcome.pop("model"))
        model.server = ServerState.of(model, model.local_modules)
        model.origin = outcome.pop("origin")
        self.state = TrainerState(TrainerStatus(outcome.pop("status")), *_STATES[stage])
        self.folder.adopt(outcome.pop("log_dir"))
        states = outcome.pop("callbacks")
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                callback.dirpath = states[callback.state_key][
                    "dirpath"
                ]  # without it, it reloads no scores
        checkpointing.restore(self.callbacks, states)
        vars(self).update(outcome)

    # What callbacks and the functions of a run may do.

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of the callbacks that override it; see :meth:`notify`."""
        for callback in self.listeners[hook]:
            self.notify(callback, hook, *arguments)

    def notify(self, callback: Callback, hook: str, *arguments: Any) -> None:
        """Call a hook of one callback.

        Its first two arguments are the trainer and the algorithm; Lightning's own callbacks get the
        user's LightningModule where the algorithm trains one.
        """
        ours = isinstance(callback, FederatedCallback)
        module = self.algorithm if ours else self.algorithm.lightning_module
        getattr(callback, hook)(self, module, *arguments)

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add a value to the round's weighted mean of a scalar, over all ranks.

        A client's counts if it is accepted.

        Args:
            name: The scalar.
            value: A number, or a tensor without dimensions.
            weight: The weight of the value.
        """
        self.collector.update(name, value, weight, self.algorithm.clients.staging)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; every rank must call it."""
        return collectives.gather(self.fabric, value)

    def local_data(self, party: int) -> LocalData:
        """What a client, or the server (``sampling.SERVER``), may train on in this round."""
        return self.datamodule.local_data(party, self.round_index, self.dtype)

    def draw_cohort(self) -> list[int]:
        """The clients of this round, in drawn order, the same on every rank."""
        if self.privacy is not None:
            return self.privacy.draw_cohort(self)
        return sampling.cohort(
            self.seed, self.round_index, self.datamodule.num_clients, self.cohort_size
        )

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
        self.counter.add(BYTES[direction], sum(sizes.values()))
        self.call("on_transfer", client, direction, sizes)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Give the scalars of a round or an evaluation to the loggers and to
        ``callback_metrics``.
        """
        self.callback_metrics.update(as_tensors(metrics))
        evaluated = {"val", "test"} & {name.partition("/")[0] for name in metrics}
        self.metric_rounds |= dict.fromkeys(sorted(evaluated), self.round_index)
        self.folder.log_metrics(metrics, self.round_index)

    def save_checkpoint(
        self, path: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, completely or not at all; every rank must call it, rank 0 writes.

        Args:
            path: The file.
            weights_only: Leave out the clients' states, such as their optimizers' momentum. A run
                whose clients have states cannot be resumed from such a checkpoint.
            storage_options: Accepted for Lightning's callbacks and not used.
        """
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save(self, Path(path), bool(weights_only))
        self.fabric.barrier()

    def save_model(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``model.json``; every rank must call it, rank 0 writes.

        Args:
            folder: The folder; it is made.
        """
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save_model(self, Path(folder))
        self.fabric.barrier()

    # What follows from the keys and the round.

    @property
    def selected(self) -> int:
        """Clients that the server selects in a round."""
        return self.faults.selected(self.clients_per_round)

    @property
    def cohort_size(self) -> int:
        """Clients drawn in a round; ``fast_dev_run`` draws two."""
        return min(self.selected, 2) if self.fast_dev_run else self.selected

    @property
    def max_steps(self) -> int | None:
        """Steps per party and phase at most; None for no limit."""
        return 1 if self.fast_dev_run else None

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

    @property
    def table_row(self) -> dict[str, str | float | bool]:
        """The settings of trainer, data and model by their keys,
        flattened: ``model.optimizer.lr``.
        """
        return table_row_of(self)

    # Ranks and files, and Lightning's names.

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
    def strategy(self) -> Strategy:
        """Fabric's strategy."""
        return self.fabric.strategy

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
        """The folder of the run, the same on every rank once the run has begun.

        None without loggers.
        """
        return self.folder.log_dir

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


def run_command(
    fabric: Fabric,
    trainer: FederatedTrainer,
    stage: str,
    model: FederatedAlgorithm,
    datamodule: FederatedDataModule,
    report: launch.Report,
) -> dict[str, float]:
    """Run a command on this rank.

    Args:
        fabric: The ranks; in a spawned process not the caller's.
        trainer: The trainer.
        stage: The command.
        model: The algorithm.
        datamodule: The data.
        report: What the calling process learns.

    Returns:
        The scalars of the evaluation.
    """
    trainer.fabric, trainer.algorithm, trainer.datamodule = fabric, model, datamodule
    trainer.seed = sampling.global_seed()
    trainer.state = TrainerState(TrainerStatus.RUNNING, *_STATES[stage])
    with report.by(fabric, trainer.outcome), _removing_unused_folder(trainer):
        setup.prepare(trainer, stage)
        federation = model.federation = trainer.make_federation(trainer)
        trainer.call("setup", stage)
        trainer.folder.log_hyperparams(dict(model.hparams))
        with _closing(trainer, stage):
            metrics = (
                fit_loop.fit(trainer, federation, report.begin)
                if stage == "fit"
                else evaluation.run_command(trainer, stage)
            )
        if trainer.state.status == TrainerStatus.RUNNING:
            trainer.state.status = TrainerStatus.FINISHED
    return metrics


@contextmanager
def _removing_unused_folder(trainer: FederatedTrainer) -> Iterator[None]:
    try:
        yield
    finally:
        trainer.folder.remove_if_unused(trainer.fabric)


@contextmanager
def _closing(trainer: FederatedTrainer, stage: str) -> Iterator[None]:
    """Report an exception to the callbacks; close loggers and callbacks in any case."""
    outcome = "failed"
    try:
        yield
        outcome = "success"
    except BaseException as error:
        trainer.call("on_exception", error)
        raise
    finally:
        trainer.folder.finalize(outcome)
        trainer.algorithm.collector = None
        trainer.call("teardown", stage)
