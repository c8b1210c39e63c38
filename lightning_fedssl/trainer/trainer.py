"""The federated trainer: its keys, its commands, and what callbacks may ask of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import Supervised
from lightning_fedssl.algorithms.common import beside
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.rehearsal import rehearse
from lightning_fedssl.distributed import launch
from lightning_fedssl.functional.dictionaries import select
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.optimizers import build_optimizer
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.interop.lightning_names import LightningNames
from lightning_fedssl.local_training import ClientsAtOnce, LocalTraining, stack_size
from lightning_fedssl.metrics.evaluation import EvaluationMetrics, MetricFactory, MetricName
from lightning_fedssl.metrics.rounds import Metrics, Scalars
from lightning_fedssl.round import Round
from lightning_fedssl.run import Beside, Run, Settings
from lightning_fedssl.state import ServerState, frozen_state, load_state
from lightning_fedssl.storage.other_names import NamesKeys
from lightning_fedssl.storage.run_folder import RunFolder
from lightning_fedssl.system import Faults, SystemModel
from lightning_fedssl.trainer import (
    callback_list,
    checkpointing,
    evaluation,
    fit_loop,
    setup,
)
from lightning_fedssl.trainer.federation import RunFederation, SimulatedFederation
from lightning_fedssl.trainer.settings import settings_of, table_row_of
from lightning_fedssl.updates.acceptance import Quarantine
from lightning_fedssl.updates.rule import UpdateRule, check_order

_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's short names of precisions."""

_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
CheckpointPath = str | Path | None


_VALUES = ("last", "metrics", "rounds", "total_bytes")
"""What the calling process takes over of the scalars of a command that other processes ran."""


class FederatedTrainer(LightningNames, metaclass=NamesKeys):
    """Simulates a federation: draws the clients of each round, lets the algorithm train, evaluates,
    logs and saves.

    Args:
        max_rounds: T, rounds of the whole run.
        clients_per_round: Clients drawn in a round (C * M in the papers); left out: 10, or all if
            there are fewer.
        clients_at_once: Clients stacked on one device (vectorized training); 1 trains them one
            after another. ``auto``: on a CPU up to 50 where networks are small and clients alike,
            else 1; on a GPU 1 for batches that fill it, else 10. On a CPU the clients of a round
            are divided into as few stacks as possible, each of which one process trains. In split
            learning (Semi-SFL) it is the number of clients whose parts of the network are stacked;
            there ``auto`` is all clients on a GPU.
        accelerator: ``cpu``, ``gpu``, ``auto``, ... as in Lightning.
        devices: Number or list of devices on a node; each trains its share of a round's clients.
            Left out: one; the command ``fit`` on the command line takes ``auto`` on a CPU.
            ``auto``: all GPUs; on a CPU as many processes as there are cores to use (with
            OMP_NUM_THREADS set, cores for that many threads each), but no more than a round has
            clients, or stacks. The result is bitwise that of one process.
        strategy: ``ddp``, ``ddp_fork``, ``ddp_spawn``, ... of Fabric: how several devices are run.
            ``auto``: ddp; on a CPU under Linux ``ddp_fork``: the processes exist for one command
            and report the model and the scalars to the process that called it.
        precision: As in Fabric: ``32-true``, with TF32 on an NVIDIA GPU: convolutions and matrix
            products multiply with 10 bits after the binary point, up to eight times as fast as
            ``32-full`` with all 23; ``bf16-mixed`` or ``16-mixed`` (GPU) for 16-bit arithmetic on
            32-bit weights; ``64-true`` for 64-bit everything; or Lightning's short names 64, 32, 16
            and bf16.
        channels_last: Store convolutions' weights and images with the channels last: faster
            kernels, the same numbers up to rounding.
        callbacks: Callbacks in addition to those that the algorithm needs. A callback of the same
            class replaces the algorithm's.
        system: Speeds of simulated devices and links; the simulated time of the run is logged as
            ``system/*``.
        faults: Clients that drop out: ``availability``
            (:class:`~lightning_fedssl.system.Faults`).
        updates: Rules for the clients' updates, in the order in which they are applied
            (:class:`~lightning_fedssl.updates.UpdateRule`): attacks (``SignFlip``,
            ``PseudoLabelPoison``), ``Quarantine``, which rejects updates that have exploded, rules
            of your own, and last at most one that combines them in place of the
            mean: ``Median``, ``TrimmedMean``, ``Krum``, or ``CentralDP``, differential privacy for
            clients. Left out: ``Quarantine``; an empty list accepts every valid update.
        logger: ``null`` or ``true``: TensorBoard and CSV below ``default_root_dir``, in a new
            folder for every ``fit``; ``false``: none; or loggers of your own: the run folder is
            that of the first that has one for each run, or else the next
            ``lightning_logs/version_N``. Without a logger the checkpoints are in ``checkpoints``
            below ``default_root_dir``, where a new run replaces an earlier one's.
        metrics: Metrics in addition to loss and accuracy: ``macro_f1``, ``recall`` (per class),
            ``auroc``, ``calibration_error``, ``confusion_matrix``, or the class of any metric of
            torchmetrics or of your own. ``num_classes`` is filled in from the data. A metric ``M``
            is logged as ``val/m`` and ``test/m``.
        check_val_every_n_rounds: Evaluate on the validation images every n rounds, and in the last
            one.
        fast_dev_run: A test of the configuration: one round with two clients and one step each; no
            files are written.
        deterministic: Use deterministic kernels only (as PyTorch's
            ``use_deterministic_algorithms``); ``warn`` warns where there is none.
        allow_changed: Let a run resume with other settings or data than its checkpoint's, or
            without the states of clients that are not there, and let a checkpoint be evaluated on
            data with other class names or another normalisation; otherwise an error names what
            differs.
        enable_progress_bar: Show the progress: in a terminal a bar, elsewhere one line a round.
            The result and the run folder are printed in any case.
        default_root_dir: Where runs are written; the current folder if left out.

    Example:
        >>> import torch
        >>> from lightning_fedssl import MLP, FedAvg, FederatedDataModule
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 2
        >>> data = FederatedDataModule.from_datasets(
        ...     (x, y), (x, y), weak="none", strong="none", num_clients=3, num_labels="all",
        ...     label_location="clients", validation=0,
        ... )
        >>> trainer = FederatedTrainer(max_rounds=2, logger=False, enable_progress_bar=False)
        >>> trainer.fit(FedAvg(network=MLP), data)
        after round 2: test accuracy ...
        >>> trainer.round_index
        2
    """

    def __init__(
        self,
        *,
        max_rounds: int = 100,
        clients_per_round: int | None = None,
        clients_at_once: ClientsAtOnce = "auto",
        accelerator: str = "auto",
        devices: int | list[int] | str | None = None,
        strategy: str | Strategy = "auto",
        precision: int | str = "32-true",
        channels_last: bool = False,
        callbacks: Callback | list[Callback] | None = None,
        system: SystemModel | None = None,
        faults: Faults | None = None,
        updates: list[UpdateRule] | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        metrics: Sequence[MetricName | MetricFactory] = (),
        check_val_every_n_rounds: int = 1,
        fast_dev_run: bool = False,
        deterministic: bool | Literal["warn"] = False,
        allow_changed: bool = False,
        enable_progress_bar: bool = True,
        default_root_dir: str | Path | None = None,
    ) -> None:
        precision = _PRECISIONS.get(str(precision), str(precision))
        settings = Settings(
            max_rounds=1 if fast_dev_run else max_rounds,
            given_clients_per_round=clients_per_round,
            clients_at_once=clients_at_once,
            precision=precision,
            dtype=_DTYPES.get(precision, torch.float32),
            channels_last=channels_last,
            system=system,
            faults=faults or Faults(),
            updates=[Quarantine()] if updates is None else list(updates),
            metrics=tuple(metrics),
            check_val_every_n_rounds=check_val_every_n_rounds,
            fast_dev_run=fast_dev_run,
            deterministic=deterministic,
            allow_changed=allow_changed,
            enable_progress_bar=enable_progress_bar,
            default_root_dir=str(default_root_dir or Path.cwd()),
        )
        _check_settings(settings, logger)
        vars(self).update(vars(settings))
        user_callbacks = callback_list.as_list(callbacks)
        if rules := [callback for callback in user_callbacks if isinstance(callback, UpdateRule)]:
            raise ValueError(
                f"trainer.callbacks has {type(rules[0]).__name__}: give it in trainer.updates"
            )
        self.given_callbacks = callback_list.usable(user_callbacks)
        callback_list.refuse_unsupported(settings.updates)
        hooks = Hooks([*self.given_callbacks, *settings.updates], FederatedCallback, self)
        folder = RunFolder(logger, writes=not fast_dev_run)
        self.run = Run(settings, hooks, Scalars(), folder)
        stacks = math.ceil(self.run.cohort_size / stack_size(clients_at_once))
        make = launch.make_fabric
        self.run.fabric = make(accelerator, devices, strategy, precision, stacks)
        self._ranks_exist = False

    # The commands.

    def fit(
        self,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule | None = None,
        ckpt_path: CheckpointPath = None,
        federation: Callable[[Run], RunFederation] = SimulatedFederation,
        train_dataloaders: Any = None,
    ) -> None:
        """Train for ``max_rounds`` rounds, then test the last model.

        SIGINT or SIGTERM ends the run after its round, without a test; see ``stopped_by``. A second
        one, or one before the first round, raises KeyboardInterrupt or SystemExit at once.

        Args:
            model: The algorithm.
            datamodule: The data and their partition.
            ckpt_path: The checkpoint to resume: a path, or ``last`` or ``best`` of the newest run
                below ``default_root_dir``.
            federation: Makes what the algorithm may ask of the run: a simulation, or a deployment.
            train_dataloaders: Lightning's name for data; refused with how to adapt them.
        """
        self.predictions = self.predictions_file = None
        self._command("fit", model, datamodule or train_dataloaders, ckpt_path, federation)

    def validate(
        self,
        model: FederatedAlgorithm | None = None,
        datamodule: FederatedDataModule | None = None,
        ckpt_path: CheckpointPath = None,
    ) -> list[Metrics]:
        """Evaluate on the validation images.

        Args:
            model: The algorithm; that of the last command if left out.
            datamodule: The data; those of the last command if left out.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the current model
                if left out.

        Returns:
            The scalars by name, in a list as Lightning's trainer returns them.
        """
        return [self._command("validate", model, datamodule, ckpt_path)]

    def test(
        self,
        model: FederatedAlgorithm | None = None,
        datamodule: FederatedDataModule | None = None,
        ckpt_path: CheckpointPath = None,
    ) -> list[Metrics]:
        """Evaluate on the test images.

        Args:
            model: The algorithm; that of the last command if left out.
            datamodule: The data; those of the last command if left out.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the current model
                if left out.

        Returns:
            The scalars by name, in a list as Lightning's trainer returns them.
        """
        return [self._command("test", model, datamodule, ckpt_path)]

    def predict(
        self,
        model: FederatedAlgorithm | None = None,
        datamodule: FederatedDataModule | None = None,
        ckpt_path: CheckpointPath = None,
        class_shares: dict[str, Any] | None = None,
    ) -> list[Tensor]:
        """Class probabilities of the test images, or of the new images in ``data.predict_root``.

        They are written to ``predictions.csv`` in the run folder, with class names, and file names
        of new images.

        Args:
            model: The algorithm; that of the last command if left out.
            datamodule: The data; those of the last command if left out.
            ckpt_path: The checkpoint to use: a path, ``last`` or ``best``; the current model if
                left out.
            class_shares: How frequent the classes are where the images come from, by their names
                (docs/class_shares.md); the more images are predicted together, the more it counts.

        Returns:
            One batch with all, ``(images, classes)``, in a list as Lightning's trainer returns it.
        """
        self.predict_shares = class_shares
        self._command("predict", model, datamodule, ckpt_path)
        return [] if self.predictions is None else [self.predictions]

    def _command(
        self,
        stage: str,
        model: FederatedAlgorithm | None,
        datamodule: FederatedDataModule | None,
        ckpt_path: CheckpointPath,
        federation: Callable[[Run], RunFederation] = SimulatedFederation,
    ) -> Metrics:
        """Run a command on all ranks, with the last model and data where none are given."""
        run = self.run
        model = model or vars(run).get("algorithm")
        datamodule = datamodule or vars(run).get("datamodule")
        if model is None or datamodule is None:
            raise ValueError(f"trainer.{stage}() has run nothing yet: give the model and its data")
        setup.refuse_other_classes(model, datamodule)
        run.ckpt_path = checkpointing.find(ckpt_path, Path(self.default_root_dir))
        if stage != "fit":
            model = Supervised.in_place_of(model, run.ckpt_path)
        run.algorithm = model
        run.datamodule = datamodule
        if launch.forks(run.fabric):  # the ranks share the data's memory; a refusal is raised once
            setup.read_data(datamodule, stage)
            setup.refuse_unsuitable_data(run, stage)
        arguments = (self, stage, federation)
        launched = cast(Callable[..., Any], run.fabric.launch)
        with (
            launch.settings(run.fabric.device, self.deterministic, self.precision),
            launch.report() as report,
        ):
            with report.expected():
                metrics: Metrics = (
                    run_command(run.fabric, *arguments, report)
                    if self._ranks_exist  # since an earlier command of this script
                    else launched(run_command, *arguments, report)
                )
            outcome = report.outcome()
        if outcome is None:
            self._ranks_exist = True
        else:
            self._take_over(stage, outcome)
        return metrics

    def outcome(self) -> dict[str, Any]:
        """What a command leaves in this trainer, as tensors and plain values.

        See :meth:`_take_over`.
        """
        run = self.run
        model = run.algorithm
        return {
            "predictions": self.predictions,
            "predictions_file": self.predictions_file,
            "run": {"stopped_by": run.stopped_by, "participation": dict(run.participation)},
            "model": {
                **frozen_state(model),
                **model.server.personal,
                **model.server.model(),
            },
            "scalars": select(vars(run.scalars), _VALUES),
            "round_index": run.round.index,
            "origin": dict(model.origin),
            "log_dir": run.folder.log_dir,
            "status": run.state.status.value,
            "callbacks": checkpointing.states_of(run.hooks.callbacks),
        }

    def prepare(self, stage: str) -> None:
        """Prepare data, model, optimizers, loggers and callbacks of a command, in this order.

        Args:
            stage: The command.

        Raises:
            ValueError: If keys of trainer, model and data contradict each other.
        """
        run = self.run
        model, datamodule = run.algorithm, run.datamodule
        run.seed = sampling.global_seed()
        with run.fabric.rank_zero_first(local=True):
            setup.read_data(datamodule, stage)
        datamodule.to(run.fabric.device)
        setup.refuse_unsuitable_data(run, stage)
        ranks = run.fabric.world_size
        run.metrics = EvaluationMetrics(
            self.metrics, datamodule.num_classes, ranks, datamodule.task
        )
        model.trainer = self
        setup.prepare_model(model, datamodule, run.fabric, run.settings, is_run=stage == "fit")
        weights = [*trained_weights(model).values()]
        factory = model.optimizer
        run.client_optimizer = build_optimizer(factory, weights, "model.optimizer")
        factory = model.server_optimizer or model.optimizer
        run.server_optimizer = build_optimizer(factory, weights, "model.server_optimizer")
        run.described = settings_of(run)
        if stage == "fit":
            run.folder.begin_run()
        run.folder.open(self.default_root_dir, run.fabric)
        user_callbacks = [*self.given_callbacks, *self.updates]
        run.hooks = Hooks(
            setup.choose_callbacks(run, model, user_callbacks), FederatedCallback, self, model
        )
        if stage == "fit":
            setup.check_monitors(run.hooks, model, datamodule, run.metrics.names)
            with run.fabric.autocast():
                rehearse(datamodule, model, self.metrics, self.dtype)
        run.local_training = LocalTraining(self.clients_at_once)
        run.scalars.begin(model.logged, run.fabric.world_size)

    def _take_over(self, stage: str, outcome: dict[str, Any]) -> None:
        """Take over the outcome of other processes, which had copies of the trainer and the
        algorithm.
        """
        run = self.run
        model, datamodule = run.algorithm, run.datamodule
        run.seed = sampling.global_seed()
        run.round = model.current_round = Round(outcome.pop("round_index"), self.max_rounds)
        setup.read_data(datamodule, stage)
        setup.build_model(model, datamodule)
        model.to(self.dtype)
        load_state(model, outcome.pop("model"))
        model.server = ServerState.from_module(model, model.local_modules, model.personal)
        model.origin = outcome.pop("origin")
        run.state = state_of(stage, TrainerStatus(outcome.pop("status")))
        run.folder.adopt(outcome.pop("log_dir"))
        vars(run).update(outcome.pop("run"))
        vars(run.scalars).update(outcome.pop("scalars"))
        states = outcome.pop("callbacks")
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                # Without it, it reloads no scores.
                callback.dirpath = states[callback.state_key]["dirpath"]
        checkpointing.restore(self.callbacks, states)
        vars(self).update(outcome)

    def save_checkpoint(
        self, path: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; only rank 0 writes, and all ranks wait for it."""
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save(self.run, Path(path), bool(weights_only))
        self.fabric.barrier()

    def save_model(self, folder: str | Path) -> None:
        """Write the weights and their description; only rank 0 writes."""
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save_model(self.run, Path(folder))
        self.fabric.barrier()

    def train_beside(
        self, folder: str, steps: int | None = None, rows: Tensor | None = None
    ) -> Beside:
        """Train what the run is compared with, on this rank by itself."""
        return beside.train(self, type(self), folder, steps, rows)

    @property
    def table_row(self) -> dict[str, str | float | bool]:
        """The settings of trainer, data and model by their keys."""
        return table_row_of(self.run)


def _check_settings(settings: Settings, logger: Any) -> None:
    """Refuse values that a configuration's types cannot."""
    left_out = {"given_clients_per_round": None, "clients_at_once": "auto"}
    for key in ("max_rounds", "check_val_every_n_rounds", *left_out):
        value = getattr(settings, key)
        is_count = isinstance(value, Integral) and int(value) >= 1
        if not is_count and value != left_out.get(key, ""):
            raise ValueError(
                f"trainer.{key.removeprefix('given_')} is {value}: give a whole number of at "
                "least 1"
            )
    check_order(settings.updates)
    if isinstance(logger, str):
        raise ValueError(
            f"trainer.logger is {logger!r}: give true for TensorBoard and CSV, false, or "
            "loggers such as CSVLogger(save_dir)"
        )


def run_command(
    fabric: Fabric,
    trainer: FederatedTrainer,
    stage: str,
    make_federation: Callable[[Run], RunFederation],
    report: launch.Report,
) -> Metrics:
    """Run a command on this rank.

    Args:
        fabric: The ranks; in a spawned process not the caller's.
        trainer: The trainer, or in a spawned process its copy.
        stage: The command.
        make_federation: Makes what the algorithm may ask of the run.
        report: What the calling process learns.

    Returns:
        The scalars of the evaluation.
    """
    run = trainer.run
    run.fabric = fabric
    run.state = state_of(stage, TrainerStatus.RUNNING)
    with report.by(fabric, trainer.outcome), ExitStack() as at_end:
        at_end.callback(run.folder.remove_if_unused, fabric)
        trainer.prepare(stage)
        federation = run.algorithm.federation = make_federation(run)
        run.hooks.call("setup", stage)
        if stage == "fit":
            setup.warn_of_what_costs(run.datamodule, fabric, run.settings.precision)
        run.folder.log_hyperparams(dict(run.algorithm.hparams))
        with _closing(run.hooks, run.folder, stage), checkpointing.reading(run):
            if stage == "fit":
                metrics = fit_loop.fit(run, federation, report.begin)
            else:
                metrics = evaluation.run_command(run, stage)
            if stage == "predict":
                result = evaluation.predict(run, trainer.predict_shares)
                trainer.predictions, trainer.predictions_file = result
        if run.state.status == TrainerStatus.RUNNING:
            run.state.status = TrainerStatus.FINISHED
    return metrics


def state_of(stage: str, status: TrainerStatus) -> TrainerState:
    """Lightning's name for a command and what became of it."""
    running = RunningStage.TRAINING if stage == "fit" else RunningStage(stage)
    return TrainerState(status, TrainerFn(stage), running)


@contextmanager
def _closing(hooks: Hooks, folder: RunFolder, stage: str) -> Iterator[None]:
    """Report an exception to the callbacks; close loggers and callbacks in any case."""
    outcome = "failed"
    try:
        yield
        outcome = "success"
    except BaseException as error:
        hooks.call("on_exception", error)
        raise
    finally:
        folder.finalize(outcome)
        hooks.call("teardown", stage)
