"""Makes a :class:`Run` from the keys of a trainer, an algorithm and data: everything before the first round."""

from __future__ import annotations

import inspect
import logging
import math
import platform
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks import (
    CollapseDetector,
    Dashboard,
    FederatedCheckpoint,
    MetricMatrices,
    ParticipationPlot,
    PartitionReport,
    PseudoLabelQuality,
    RoundProgress,
    RunResult,
    StaticBatchNorm,
    SystemClock,
)
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.partition.statistics import plural
from lightning_fedssl.distributed import collectives
from lightning_fedssl.distributed.cpu_ranks import WORTH_STEPS
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.local_training import LocalTraining, stack_size
from lightning_fedssl.metrics import MetricCollector
from lightning_fedssl.state import ServerState
from lightning_fedssl.trainer import callback_list
from lightning_fedssl.trainer.callback_list import CallbackList
from lightning_fedssl.trainer.evaluation_metrics import EvaluationMetrics, MetricFactory, MetricName
from lightning_fedssl.trainer.exchange import sends_all_updates
from lightning_fedssl.trainer.reporting import Reporting
from lightning_fedssl.trainer.run import Run, Stage, Status
from lightning_fedssl.trainer.run_folder import RunFolder
from lightning_fedssl.trainer_interface import TrainerInterface

_log = logging.getLogger(__name__)


class ConfiguredTrainer(TrainerInterface, Protocol):
    """The keys of a trainer that only this module reads; :class:`FederatedTrainer` documents them.

    Attributes:
        given_callbacks: The callbacks of the user.
        folder: The loggers.
        status: What the trainer reports.
    """

    clients_at_once: int | Literal["auto"]
    client_store: Literal["memory", "disk"]
    channels_last: bool
    compile: bool
    cuda_graphs: bool
    quarantine: float | None
    share_server_steps: bool
    allow_changed: bool
    metrics: tuple[MetricName | MetricFactory, ...]
    reporting: Reporting
    given_callbacks: list[Callback]
    folder: RunFolder
    status: Status


def make_run(
    trainer: ConfiguredTrainer, stage: Stage, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule
) -> Run:
    """Prepare data, model, optimizers, loggers and callbacks, in this order.

    Args:
        trainer: The keys.
        stage: The command.
        algorithm: The algorithm.
        datamodule: The data.

    Raises:
        ValueError: If keys of trainer, model and data contradict each other.
    """
    fabric = trainer.fabric
    refuse_uninitialised(algorithm)
    prepare_data(trainer, stage, algorithm, datamodule)
    EvaluationMetrics(trainer.metrics, datamodule.num_classes)  # refuses unusable metrics before the first round
    algorithm.trainer = trainer  # type: ignore[assignment]
    prepare_model(trainer, algorithm, datamodule)
    parameters = [p for p in algorithm.parameters() if p.requires_grad]
    client_optimizer = build_optimizer(algorithm.optimizer_factory, parameters, "model.optimizer")
    server_optimizer = build_optimizer(algorithm.server_optimizer_factory, parameters, "model.server_optimizer")
    if stage == "fit":
        trainer.folder.begin_run()
    trainer.folder.open(trainer.default_root_dir, fabric)
    if trainer.client_store == "disk":
        root = None if trainer.fast_dev_run else trainer.default_root_dir
        algorithm.clients.keep_on_disk(trainer.folder.log_dir or root)
    hooks = CallbackList(choose_callbacks(trainer, algorithm), trainer, algorithm)
    watchers = [type(callback).__name__ for callback in hooks.listeners("on_client_batch_end")]
    run = Run(
        trainer=trainer,
        stage=stage,
        seed=trainer.seed,
        fabric=fabric,
        algorithm=algorithm,
        datamodule=datamodule,
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        local_training=LocalTraining(trainer.clients_at_once, watchers),
        hooks=hooks,
        folder=trainer.folder,
        status=trainer.status,
        collector=MetricCollector(trainer.fabric.world_size),
        reporting=trainer.reporting,
        quarantine=trainer.quarantine,
        shares_server_steps=trainer.share_server_steps and fabric.world_size > 1,
        metrics=trainer.metrics,
        allow_changed=trainer.allow_changed,
    )
    algorithm.collector = run.log
    return run


def read_data(datamodule: FederatedDataModule, stage: Stage) -> None:
    """Read and partition the data; a second call does nothing."""
    datamodule.prepare_data()
    datamodule.setup(stage)


def build_model(algorithm: FederatedAlgorithm, datamodule: FederatedDataModule) -> None:
    """Build the network for the data; a second call does nothing."""
    refuse_unusable_numbers(algorithm)
    fit_to_data(algorithm, datamodule, "num_classes")
    fit_to_data(algorithm, datamodule, "in_shape")
    algorithm.configure_model()


def prepare_data(
    trainer: ConfiguredTrainer, stage: Stage, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule
) -> None:
    """Read and partition the data, and refuse data that the algorithm or the trainer cannot train on."""
    collectives.together(trainer.fabric, lambda: read_data(datamodule, stage))
    datamodule.to(trainer.fabric.device)
    if stage == "fit":
        trainer.reporting.check(algorithm, datamodule.num_clients)
        algorithm.check_data(datamodule)
        if trainer.fabric.is_global_zero:
            warn_of_clients_without_images(datamodule)
            warn_of_idle_ranks(trainer, algorithm)
            warn_of_emulated_bfloat16(trainer)


def refuse_uninitialised(algorithm: FederatedAlgorithm) -> None:
    """Refuse a method that has not called the ``__init__`` of its base.

    Raises:
        ValueError: Names the class and the line to add.
    """
    if "network_factory" not in vars(algorithm):
        raise ValueError(
            f"{type(algorithm).__name__}.__init__ does not call super().__init__(...) with the arguments of its base"
        )


def pays_for_ranks(trainer: ConfiguredTrainer, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule) -> bool:
    """Whether a run is long enough for several ranks, and does not depend on their number.

    An algorithm or callback from outside of this package may store something for each client in an attribute, and would
    then have a part of it on each rank: such a run is not distributed unless the user asks for it.

    The function reads the data and builds the network, which the forked ranks then share.

    Args:
        trainer: The keys.
        algorithm: The algorithm.
        datamodule: The data.
    """
    if not algorithm.trains_clients or trainer.share_server_steps or trainer.cuda_graphs:
        return False  # nothing to share, or a result that depends on how the ranks share it
    observers = [callback for callback in trainer.given_callbacks if callback_list.observes_clients(callback)]
    if not all(type(part).__module__.startswith("lightning_fedssl.") for part in (algorithm, *observers)):
        return False
    read_data(datamodule, "fit")
    build_model(algorithm, datamodule)
    per_client = int(datamodule.statistics.sizes.sum()) / datamodule.num_clients / datamodule.client_batch_size
    steps = trainer.max_rounds * trainer.reporting.selected * algorithm.client_epochs * per_client
    model = sum(t.nbytes for t in algorithm.state_dict().values())
    return steps >= WORTH_STEPS and sends_all_updates(model, trainer.reporting.selected)


def warn_of_clients_without_images(datamodule: FederatedDataModule) -> None:
    """Log, in one line, the clients that skip every round."""
    empty = datamodule.clients_without_images()
    if empty:
        numbers = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        _log.warning(
            "%d of %d clients have no %s and skip every round (%s); change data.partition or lower "
            "data.num_clients if this is not intended",
            len(empty), datamodule.num_clients, datamodule.spec.noun, numbers,
        )  # fmt: skip


def warn_of_idle_ranks(trainer: ConfiguredTrainer, algorithm: FederatedAlgorithm) -> None:
    """Log, in one line, how many ranks can never train a client; ranks that share the server's steps have work."""
    ranks, clients = trainer.fabric.world_size, trainer.reporting.selected if algorithm.trains_clients else 0
    largest = stack_size(trainer.clients_at_once) if trainer.fabric.device.type == "cpu" else 1
    stacks = math.ceil(clients / largest)
    if ranks > max(stacks, 1) and not trainer.share_server_steps:
        stacked = stacks and largest > 1
        _log.warning(
            "%d of %d ranks train no client, because a round has %s: lower trainer.devices%s",
            ranks - stacks, ranks, f"{plural(stacks, 'stack')} of clients" if stacked else plural(stacks, "client"),
            " or trainer.clients_at_once" if stacked else "",
        )  # fmt: skip


def warn_of_emulated_bfloat16(trainer: ConfiguredTrainer) -> None:
    """Log, in one line, that ``bf16-mixed`` makes a run slower on this processor, not faster."""
    on_cpu = trainer.precision == "bf16-mixed" and trainer.fabric.device.type == "cpu"
    if on_cpu and platform.machine() == "x86_64" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        _log.warning("this processor has no instructions for bfloat16 (AVX512): --trainer.precision 32-true is faster")


def refuse_unusable_numbers(algorithm: FederatedAlgorithm) -> None:
    """Refuse arguments that are NaN or infinite, and whole numbers beyond 64 bits.

    Raises:
        ValueError: With the key.
    """
    for key, value in algorithm.hparams.items():
        infinite = isinstance(value, float) and math.isnan(value)
        if infinite or (isinstance(value, int) and abs(value) >= 10**18):
            raise ValueError(f"model.{key} is {value}: give a finite number below 1e18")


def prepare_model(trainer: ConfiguredTrainer, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule) -> None:
    """Build the network for the data, and put it and the global model on the device."""
    fabric = trainer.fabric
    build_model(algorithm, datamodule)
    fabric.strategy.precision.convert_module(algorithm)
    algorithm.to(fabric.device)
    if trainer.channels_last:
        algorithm.to(memory_format=torch.channels_last)
    if not hasattr(algorithm, "server"):
        algorithm.server = ServerState.of(algorithm, algorithm.local_modules)
    algorithm.server.to(fabric.device)  # an earlier command may have run on another device


def fit_to_data(algorithm: FederatedAlgorithm, datamodule: FederatedDataModule, name: str) -> None:
    """Set an argument of the algorithm that follows from the data.

    Raises:
        ValueError: If the argument was given and contradicts the data.
    """
    given, actual = getattr(algorithm, name), getattr(datamodule, name)
    if given is not None and given not in (actual, list(actual) if isinstance(actual, tuple) else actual):
        raise ValueError(f"model.{name} is {given}, but the data have {actual}: leave it out, the data set it")
    setattr(algorithm, name, actual)


def choose_callbacks(trainer: ConfiguredTrainer, algorithm: FederatedAlgorithm) -> list[Callback]:
    """The user's callbacks, those that the algorithm needs, and the defaults."""
    needed = callback_list.as_list(algorithm.configure_callbacks())
    if has_static_batch_norm(algorithm):
        needed.append(StaticBatchNorm(source="moments", for_clients=algorithm.clients_use_statistics))
    defaults: list[Callback] = [PartitionReport(), PseudoLabelQuality(), CollapseDetector(), RoundProgress()]
    defaults += [MetricMatrices(), Dashboard(), RunResult()]
    reporting = trainer.reporting
    if reporting.system is not None:
        defaults.append(SystemClock(reporting.system, reporting.deadline_s, reporting.clients_per_round))
    if reporting.loses_clients:
        defaults.append(ParticipationPlot())
    if not trainer.fast_dev_run:
        defaults.append(FederatedCheckpoint())
    return callback_list.choose(trainer.given_callbacks, needed, defaults)


def build_optimizer(factory: OptimizerCallable, weights: Sequence[Tensor], key: str) -> Optimizer:
    """The optimizer of clients or server.

    Args:
        factory: From the configuration.
        weights: What it trains.
        key: Its key, for messages: ``model.optimizer``.

    Raises:
        ValueError: If its settings are wrong, or it cannot make a step from one dense gradient.
    """
    try:
        optimizer = factory(weights)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{key}: {reason}; change {key}.init_args, or choose another optimizer") from error
    if not math.isfinite(optimizer.defaults.get("lr", 0)):
        raise ValueError(
            f"{key}: the learning rate is {optimizer.defaults['lr']}; give a finite number ({key}.init_args.lr)"
        )
    for name, value in optimizer.defaults.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}.init_args.{name} is {value}: give a finite number")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.SparseAdam) or (closure and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{key} is {type(optimizer).__name__}, which needs sparse gradients or computes the loss several times in "
            "a step; choose one that makes a step from one gradient, such as SGD or Adam"
        )
    return prefer_fused(optimizer)


def prefer_fused(optimizer: Optimizer) -> Optimizer:
    """Use the optimizer's fused kernel where it has one and the user chose no implementation.

    Not with dampening, with which the first step is none from a momentum of 0: fused SGD needs all momenta or none.
    """
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("differentiable") or group.get("dampening")
        if group.get("fused", False) is None and not chosen:
            group["fused"] = True
    return optimizer
