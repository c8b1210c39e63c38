"""The federated trainer: its keys and its commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule, require_federated
from lightning_fedssl.local_training import stack_size
from lightning_fedssl.state import ServerState, frozen_state, load_state
from lightning_fedssl.system import Availability, SystemModel
from lightning_fedssl.trainer import callback_list, checkpointing, evaluation, fit_loop, launch, setup
from lightning_fedssl.trainer.evaluation_metrics import MetricFactory, MetricName
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.reporting import Reporting
from lightning_fedssl.trainer.run import Run, Stage, Status, as_tensors
from lightning_fedssl.trainer.run_folder import RunFolder
from lightning_fedssl.trainer.signals import exit_on_sigterm
from lightning_fedssl.trainer.view import TrainerView

_PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.float32, "64-true": torch.float64}
_STATES: dict[Stage, tuple[TrainerFn, RunningStage]] = {
    "fit": (TrainerFn.FITTING, RunningStage.TRAINING),
    "validate": (TrainerFn.VALIDATING, RunningStage.VALIDATING),
    "test": (TrainerFn.TESTING, RunningStage.TESTING),
    "predict": (TrainerFn.PREDICTING, RunningStage.PREDICTING),
}


class FederatedTrainer(TrainerView):
    """Simulates a federation: draws the clients of each round, lets the algorithm train, evaluates, logs and saves.

    Args:
        max_rounds: T, rounds of the whole run.
        clients_per_round: Clients drawn in a round (C * M in the papers).
        clients_at_once: Clients stacked on one device (vectorized training); 1 trains them one after another. ``auto``:
            1 on a CPU, on a GPU as many as fit into its memory. On a CPU the clients of a round are divided into as few
            stacks as possible, each of which one process trains. In split learning (Semi-SFL) it is the number of
            clients whose parts of the network are stacked; there ``auto`` is all clients on a GPU.
        accelerator: ``cpu``, ``gpu``, ``auto``, ... as in Lightning.
        devices: Number or list of devices on a node; each trains its share of a round's clients. Left out: one GPU; on
            a CPU a process for each core, forked by ``fit`` where this pays, with bitwise the same result (see
            ``docs/scaling.md``). ``auto``: all GPUs; on a CPU as many processes as there are cores to use (with
            OMP_NUM_THREADS set, cores for that many threads each), but no more than a round has clients, or stacks.
        num_nodes: Number of machines.
        strategy: ``ddp``, ``ddp_fork``, ...: how several devices are run; ``auto``: by ddp if there are several.
            ``forked``: on a CPU, this process and others that are forked from it for each command.
        precision: ``32-true``; ``bf16-mixed`` for bfloat16 arithmetic on 32-bit weights; ``64-true`` for 64-bit
            everything.
        channels_last: Store convolutions' weights and images with the channels last: faster kernels, the same numbers
            up to rounding.
        share_server_steps: Divide every batch of the server's training among the ranks, so that this part of a round
            gets faster with ``devices``, too. Batch norm uses the statistics of the whole batch, and gradients are
            summed: the weights are those of one rank up to rounding, and no longer bit by bit. Off: every rank trains
            the server's model alike.
        compile: Compile the network with ``torch.compile``, which takes a minute or more at the start. Stacked clients
            (``clients_at_once``) run uncompiled.
        callbacks: Callbacks in addition to those that the algorithm needs. A callback of the same class replaces the
            algorithm's.
        system: Speeds of simulated devices and links; the simulated time of the run is logged as ``system/*``.
        availability: Which clients drop out of a round: they receive the model and send nothing. ``RandomDropout``,
            ``UnevenDropout``, ``DiurnalDropout`` or a subclass of ``Availability``; left out, nobody drops out.
        deadline_s: Simulated seconds (of ``system``) from the broadcast after which an update is late and not used.
        over_selection: Select ``clients_per_round * (1 + over_selection)`` clients, and use the updates of the first
            ``clients_per_round`` that finish in the simulated time of ``system``; without it, the first drawn ones.
        logger: ``null`` or ``true``: TensorBoard and CSV below ``default_root_dir``, in a new folder for every ``fit``;
            ``false``: none; or loggers of your own, which keep their folder. Without a logger the checkpoints are in
            ``checkpoints`` below ``default_root_dir``, and there are no tables and pictures. A new run moves an earlier
            run's checkpoints to ``earlier_1``, ``earlier_2`` and so on. Runs at the same time need different folders.
        metrics: Metrics in addition to loss and accuracy: ``macro_f1``, ``recall`` (per class), ``auroc``,
            ``calibration_error``, ``confusion_matrix``, or the class of any metric of torchmetrics or of your own.
            ``num_classes`` is filled in from the data. A metric ``M`` is logged as ``val/m`` and ``test/m``.
        check_val_every_n_rounds: Evaluate on the validation images every n rounds, and in the last one.
        fast_dev_run: A test of the configuration: one round with two clients and one step each; no files are written.
        deterministic: Use deterministic kernels only (as PyTorch's ``use_deterministic_algorithms``).
        benchmark: On a GPU, let cuDNN measure its algorithms for each new shape and use the fastest; not with
            ``deterministic``. Left out: PyTorch's setting, false.
        float32_matmul_precision: The precision of a GPU's matrix products of 32-bit numbers: ``highest``: 32 bits;
            ``high``: TensorFloat-32, faster; ``medium``: bfloat16. Left out: PyTorch's setting, ``highest``.
        cuda_graphs: Record the step of stacked clients as a CUDA graph, and replay it. Off by default, because it has
            not been measured on a GPU yet. A step that cannot be recorded runs without a graph, after a warning.
        quarantine: Reject a client's update that moved the weights by more than this many times the round's median
            movement, and by more than the weights' own norm (with at least 3 finite updates in the round): an update
            that has exploded. It is logged with its client and counted as ``client/refused``. null accepts every finite
            update. A movement begins at the weights that the client received: the global weights, or, with FedRGD,
            EASGD and Overlap Local-SGD, those of its group or slot. The weights' own norm is the norm of these weights,
            times the schedule's factor of the learning rate.
        allow_changed: Let a run resume with other settings or data than its checkpoint's, and let a checkpoint be
            evaluated on data with other class names or another normalisation; otherwise an error names what differs.
        client_store: Where client states are stored between rounds: in ``memory``, or on ``disk``, in files of the run
            folder that are read when a client is drawn, so that the memory does not grow with the number of clients.
        enable_progress_bar: A progress bar on a terminal; otherwise one line per round. False: neither.
        default_root_dir: Where runs are written; the current folder if left out.
    """

    def __init__(
        self,
        *,
        max_rounds: int = 100,
        clients_per_round: int = 10,
        clients_at_once: int | Literal["auto"] = "auto",
        accelerator: str = "auto",
        devices: int | list[int] | str | None = None,
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true",
        channels_last: bool = False,
        share_server_steps: bool = False,
        compile: bool = False,
        callbacks: Callback | list[Callback] | None = None,
        system: SystemModel | None = None,
        availability: Availability | None = None,
        deadline_s: float | None = None,
        over_selection: float = 0.0,
        logger: Logger | list[Logger] | bool | None = None,
        metrics: Sequence[MetricName | MetricFactory] = (),
        check_val_every_n_rounds: int = 1,
        fast_dev_run: bool = False,
        deterministic: bool = False,
        benchmark: bool | None = None,
        float32_matmul_precision: Literal["highest", "high", "medium"] | None = None,
        cuda_graphs: bool = False,
        quarantine: float | None = 10.0,
        allow_changed: bool = False,
        client_store: Literal["memory", "disk"] = "memory",
        enable_progress_bar: bool = True,
        default_root_dir: str | Path | None = None,
    ) -> None:
        _check_counts(
            max_rounds=max_rounds, clients_per_round=clients_per_round, num_nodes=num_nodes,
            check_val_every_n_rounds=check_val_every_n_rounds,
        )  # fmt: skip
        _check_choices(clients_at_once, client_store, share_server_steps and compile, quarantine)
        self.max_rounds = 1 if fast_dev_run else max_rounds
        self.clients_per_round = clients_per_round
        self.reporting = Reporting(clients_per_round, over_selection, availability, system, deadline_s)
        self.clients_at_once = clients_at_once
        self.metrics = tuple(metrics)
        self.check_val_every_n_rounds = check_val_every_n_rounds
        self.fast_dev_run = fast_dev_run
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.float32_matmul_precision = float32_matmul_precision
        self.cuda_graphs = cuda_graphs
        self.share_server_steps = share_server_steps
        self.quarantine = quarantine
        self.allow_changed = allow_changed
        self.client_store = client_store
        self.enable_progress_bar = enable_progress_bar
        self.default_root_dir = str(default_root_dir or Path.cwd())
        stacks = math.ceil(self.cohort_size / stack_size(clients_at_once))
        self.fabric = launch.make_fabric(accelerator, devices, num_nodes, strategy, precision, stacks)
        self.dtype = _PRECISIONS[precision]
        self.precision = precision
        self.channels_last = channels_last
        self.compile = compile
        self.system = system
        self.given_callbacks = callback_list.usable(callback_list.as_list(callbacks))
        self.callbacks = list(self.given_callbacks)
        self.folder = RunFolder(logger, writes=not fast_dev_run)
        self.status = Status()
        self.ckpt_path: Path | None = None
        self.make_federation: Callable[[Run], SimulatedFederation] = SimulatedFederation
        self.seed: int
        self.algorithm: FederatedAlgorithm
        self.datamodule: FederatedDataModule
        self._launcher = launch.Launcher(self.fabric)

    @property
    def cohort_size(self) -> int:
        """Clients drawn in a round."""
        return fit_loop.cohort_size(self.reporting.selected, self.fast_dev_run)

    # The commands.

    def fit(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> None:
        """Train for ``max_rounds`` rounds, then test the last model.

        Args:
            model: The algorithm.
            datamodule: The data and their partition.
            ckpt_path: The checkpoint to resume: a path, or ``last`` or ``best`` of the newest run below
                ``default_root_dir``.
        """
        self._run("fit", model, datamodule, ckpt_path)

    def validate(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """Evaluate on the validation images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the current model if left out.
        """
        return self._run("validate", model, datamodule, ckpt_path)

    def test(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """Evaluate on the test images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the current model if left out.
        """
        return self._run("test", model, datamodule, ckpt_path)

    def predict(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> Tensor | None:
        """Class probabilities of the test images, or of the new images in ``data.predict_root``.

        They are written to ``predictions.csv`` in the run folder, with class names, and file names of new images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to use: a path, ``last`` or ``best``; the current model if left out.

        Returns:
            ``(images, classes)``.
        """
        self._run("predict", model, datamodule, ckpt_path)
        return self.predictions

    def _run(
        self,
        stage: Stage,
        model: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        ckpt_path: str | Path | None,
    ) -> dict[str, float]:
        """Run a command on all ranks."""
        require_federated(datamodule)
        self.ckpt_path = checkpointing.find(ckpt_path, Path(self.default_root_dir))
        simulates = stage == "fit" and self.make_federation is SimulatedFederation
        launch.use_ranks(self.fabric, lambda: simulates and setup.pays_for_ranks(self, model, datamodule))
        outcome = self._launcher.run(run_command, self, stage, model, datamodule)
        if launch.spawns(self.fabric):
            self._adopt(stage, model, datamodule, outcome)
        return outcome["metrics"]

    def _adopt(
        self, stage: Stage, model: FederatedAlgorithm, datamodule: FederatedDataModule, outcome: launch.Outcome
    ) -> None:
        """Take over the outcome of spawned processes, which had copies of the trainer and the algorithm."""
        self.seed, self.algorithm, self.datamodule = sampling.global_seed(), model, datamodule
        setup.read_data(datamodule, stage)
        setup.fit_to_data(model, datamodule, "num_classes")
        setup.fit_to_data(model, datamodule, "in_shape")
        model.configure_model()
        if hasattr(model, "server"):
            del model.server
        model.to(self.dtype)
        load_state(model, outcome["model"])
        model.server = ServerState.of(model, model.local_modules)
        self.status.round_index = outcome["round"]
        self.status.predictions, self.status.predictions_file = outcome["predictions"], outcome["predictions_file"]
        self.status.state = TrainerState(TrainerStatus(outcome["status"]), *_STATES[stage])
        self.folder.adopt(outcome["log_dir"])
        self.status.callback_metrics = as_tensors(outcome["callback_metrics"])


def run_command(
    fabric: Fabric,
    trainer: FederatedTrainer,
    stage: Stage,
    model: FederatedAlgorithm,
    datamodule: FederatedDataModule,
) -> launch.Outcome:
    """Run a command on this rank.

    Args:
        fabric: The ranks; in a spawned process not the parent's.
        trainer: The trainer.
        stage: The command.
        model: The algorithm.
        datamodule: The data.
    """
    trainer.fabric, trainer.algorithm, trainer.datamodule = fabric, model, datamodule
    trainer.seed, status = sampling.global_seed(), trainer.status
    status.state = TrainerState(TrainerStatus.RUNNING, *_STATES[stage])
    launch.set_deterministic(trainer.deterministic)
    launch.set_benchmark(trainer.benchmark, trainer.deterministic)
    launch.set_float32_matmul_precision(trainer.float32_matmul_precision)
    with launch.settings_of(fabric.device), exit_on_sigterm(), _removing_unused_folder(trainer):
        run = trainer.run = setup.make_run(trainer, stage, model, datamodule)
        trainer.callbacks = list(run.hooks.callbacks)
        federation = model.federation = trainer.make_federation(run)
        run.call("setup", stage)
        run.folder.log_hyperparams(dict(model.hparams))
        with _closing(run):
            if stage == "fit":
                metrics = fit_loop.fit(run, federation, trainer.ckpt_path)
            else:
                metrics = evaluation.run_command(run, trainer.ckpt_path)
    if status.state.status == TrainerStatus.RUNNING:
        status.state.status = TrainerStatus.FINISHED
    return {
        "metrics": metrics,
        "model": {**frozen_state(model), **model.server.model()},
        "round": status.round_index,
        "predictions": status.predictions,
        "predictions_file": status.predictions_file,
        "log_dir": trainer.folder.log_dir,
        "status": status.state.status.value,
        "callback_metrics": status.scalars(),
    }


@contextmanager
def _removing_unused_folder(trainer: FederatedTrainer) -> Iterator[None]:
    try:
        yield
    finally:
        trainer.folder.remove_if_unused(trainer.fabric)


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Report an exception to the callbacks; close loggers and callbacks in any case."""
    outcome = "failed"
    try:
        yield
        outcome = "success"
    except BaseException as error:
        run.call("on_exception", error)
        raise
    finally:
        run.folder.finalize(outcome)
        run.algorithm.collector = None
        run.call("teardown", run.stage)


def _check_counts(**counts: Any) -> None:
    """Refuse a key whose value is no whole number of at least 1."""
    for key, value in counts.items():
        if not isinstance(value, Integral):
            raise ValueError(f"trainer.{key} is {value}: give a whole number")
        if value < 1:
            raise ValueError(f"trainer.{key} is {value}: give 1 or more")


def _check_choices(
    clients_at_once: int | Literal["auto"], client_store: str, shares_compiled: bool, quarantine: float | None
) -> None:
    """Refuse values that are none of the choices of their keys, or that exclude each other."""
    if clients_at_once != "auto" and (type(clients_at_once) is not int or clients_at_once < 1):
        raise ValueError(f"trainer.clients_at_once is {clients_at_once}: give a whole number from 1 on, or auto")
    if client_store not in ("memory", "disk"):
        raise ValueError(f"trainer.client_store is {client_store}: give memory or disk")
    if shares_compiled:
        raise ValueError(
            "trainer.share_server_steps needs a network that is not compiled, as ranks share its batch norms: set "
            "trainer.compile to false"
        )
    if quarantine is not None and not quarantine > 1:
        raise ValueError(f"trainer.quarantine is {quarantine}: give a factor above 1, or null to accept every update")
