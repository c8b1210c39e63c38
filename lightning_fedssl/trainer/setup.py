"""Prepares a command from the keys of a trainer, an algorithm and data: everything before the first
round.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Collection, Sequence

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.core.hooks import ModelHooks

from lightning_fedssl import algorithms, sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks import (
    ClientEvaluation,
    CollapseDetector,
    FederatedCheckpoint,
    PseudoLabelQuality,
    RoundProgress,
    RunReport,
    RunResult,
    StaticBatchNorm,
    SystemClock,
)
from lightning_fedssl.data.datamodule import FederatedDataModule, require_federated
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.run import Run, Settings
from lightning_fedssl.state import ServerState
from lightning_fedssl.task import Task
from lightning_fedssl.trainer import callback_list

_log = logging.getLogger(__name__)

FEWEST_VALIDATION = 5
"""The number of validation images of a class below which a run warns of them."""


def refuse_other_classes(model: object, datamodule: object) -> None:
    """Refuse a model or data that a federation cannot train on, and hooks that only Lightning's
    loop calls.

    Raises:
        TypeError: If the model is not a federated algorithm.
        ValueError: If the data are not federated; or names a hook of the model, and what to use
            instead.
    """
    if not isinstance(model, FederatedAlgorithm):
        raise TypeError(
            f"FederatedTrainer trains a FederatedAlgorithm, and {type(model).__name__} is not one: "
            "give a LightningModule to FedAvg.from_lightning, its network to a method as "
            "model.network, or derive a method from lightning_fedssl.FederatedAlgorithm"
        )
    if "network_factory" not in vars(model):
        raise ValueError(
            f"{type(model).__name__}.__init__ does not call super().__init__(...) with the "
            "arguments of its base"
        )
    hooks = [name for name in dir(ModelHooks) if name.startswith("on_")]
    for name in (*hooks, "configure_optimizers", "optimizer_step", "lr_scheduler_step"):
        if getattr(type(model), name) is not getattr(FederatedAlgorithm, name, None):
            raise ValueError(
                f"{type(model).__name__}.{name} is a hook of Lightning's loop, which a federated "
                "run does not call: give optimizers as model.optimizer, model.server_optimizer and "
                "model.schedule, and use the hooks of a FederatedCallback or the functions of "
                "FederatedAlgorithm, such as on_round_start and on_client_start"
            )
    require_federated(datamodule)


def read_data(datamodule: FederatedDataModule, stage: str) -> None:
    """Read and partition the data; a second call does nothing."""
    datamodule.prepare_data()
    datamodule.setup(stage)


def refuse_unsuitable_data(run: Run, stage: str) -> None:
    """Refuse to ``fit`` on data that the algorithm or the trainer cannot train on.

    Raises:
        ValueError: Names the key and the remedy.
    """
    if stage != "fit":
        return
    for rule in run.settings.updates:
        rule.check(run.hooks.trainer)
    refuse_pair(run.algorithm, run.datamodule, run.clients_per_round)


def refuse_pair(
    algorithm: FederatedAlgorithm, datamodule: FederatedDataModule, clients_per_round: int
) -> None:
    """Refuse data that an algorithm cannot train on, or that have too few clients.

    Args:
        algorithm: The method.
        datamodule: The data, which are partitioned.
        clients_per_round: Clients drawn in a round.

    Raises:
        ValueError: Names the key and the remedy.
    """
    refuse_other_task(algorithm, datamodule.task)
    if clients_per_round > datamodule.num_clients:
        raise ValueError(
            f"trainer.clients_per_round {clients_per_round} is more than data.num_clients "
            f"{datamodule.num_clients}: lower the first or raise the second"
        )
    algorithm.check_data(datamodule)


def refuse_other_task(algorithm: FederatedAlgorithm, task: Task) -> None:
    """Refuse a method that cannot train on the data's task.

    Raises:
        ValueError: Names methods that can.
    """
    if algorithm.needs in task.gives:
        return
    raise ValueError(
        f"data.task: {type(algorithm).__name__} cannot train on {type(task).__name__}; "
        "choose by data.label_location: "
        + ", ".join(
            f"--model {method.__name__} ({method.labels_at or 'server or clients'})"
            for method in (getattr(algorithms, name) for name in algorithms.__all__)
            if method.needs in task.gives
        )
    )


def warn_of_what_costs(datamodule: FederatedDataModule, fabric: Fabric, precision: str) -> None:
    """Warn of clients without images, of few validation images, and of bfloat16 on a processor that
    emulates it.
    """
    if empty := datamodule.clients_without_images():
        _log.warning(
            "%d of %d clients have no %s and skip every round (%s); change data.partition or lower "
            "data.num_clients if this is not intended",
            len(empty), datamodule.num_clients, datamodule.spec.noun,
            ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else ""),
        )  # fmt: skip
    images = len(datamodule.validation_labels)
    if 0 < images < FEWEST_VALIDATION * datamodule.num_classes:
        _log.warning(
            "there are %d validation %ss for %d classes: val/%s and the choice of the best round "
            "are uncertain; give more labelled data, a larger data.validation, or, for a trial, "
            "data.validation: test",
            images, datamodule.spec.noun, datamodule.num_classes, datamodule.task.monitor,
        )  # fmt: skip
    emulates = (
        platform.machine() == "x86_64" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    )
    if precision == "bf16-mixed" and fabric.device.type == "cpu" and emulates:
        _log.warning(
            "this processor has no instructions for bfloat16 (AVX512): --trainer.precision "
            "32-true is faster"
        )


def build_model(algorithm: FederatedAlgorithm, datamodule: FederatedDataModule) -> None:
    """Build the network for the data; a second call does nothing.

    Raises:
        ValueError: If an argument of the algorithm is not a usable number, or contradicts
            the data.
    """
    for key, value in algorithm.hparams.items():
        if (isinstance(value, float) and math.isnan(value)) or (
            isinstance(value, int) and abs(value) >= 10**18  # more than a tensor of int64 holds
        ):
            raise ValueError(f"model.{key} is {value}: give a finite number below 1e18")
    for name in ("num_classes", "in_shape"):
        configured = getattr(algorithm, name)
        actual = getattr(datamodule, name)
        if configured is not None and configured not in (
            actual,
            list(actual) if isinstance(actual, tuple) else actual,
        ):
            raise ValueError(
                f"model.{name} is {configured}, but the data have {actual}: leave it out, the data "
                "set it"
            )
        setattr(algorithm, name, actual)
    algorithm.task = datamodule.task
    algorithm.configure_model()
    _refuse_tied_weights(algorithm)


def _refuse_tied_weights(algorithm: FederatedAlgorithm) -> None:
    """Refuse one weight under two names: weights are sent and averaged by name."""
    names: dict[int, str] = {}
    for name, weight in algorithm.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(id(weight), name)) != name:
            raise ValueError(
                f"model: {other} and {name} are one weight: give each layer a weight of its own, "
                "and keep a layer that is called twice under one name alone"
            )


def prepare_model(
    algorithm: FederatedAlgorithm,
    datamodule: FederatedDataModule,
    fabric: Fabric,
    settings: Settings,
    is_run: bool = False,
) -> None:
    """Build the network for the data, and put it and the global model on the device.

    Args:
        algorithm: The method.
        datamodule: The data.
        fabric: Precision and device.
        settings: The keys of the trainer.
        is_run: Whether a run begins: the classifier of a new model is then set (``init_head``).
    """
    build_model(algorithm, datamodule)
    fabric.strategy.precision.convert_module(algorithm)
    algorithm.to(fabric.device)
    if settings.channels_last:
        algorithm.to(memory_format=torch.channels_last)
    if not hasattr(algorithm, "server"):
        if is_run:
            algorithm.on_run_start(datamodule.local_data(sampling.SERVER, 0, settings.dtype))
        algorithm.server = ServerState.from_module(
            algorithm, algorithm.local_modules, algorithm.personal
        )
    algorithm.server.to(fabric.device)  # an earlier command may have run on another device


def choose_callbacks(
    run: Run, algorithm: FederatedAlgorithm, user_callbacks: Sequence[Callback]
) -> list[Callback]:
    """The user's callbacks, those that the algorithm needs, and the defaults."""
    needed = callback_list.as_list(algorithm.configure_callbacks())
    if has_static_batch_norm(algorithm):
        source = algorithm.statistics_of
        needed.append(StaticBatchNorm(source, for_clients=algorithm.clients_use_statistics))
    one_class = "one class" in algorithm.task.gives and run.datamodule.class_names
    if algorithm.personal and one_class:
        needed.append(ClientEvaluation())
    defaults = [
        PseudoLabelQuality(),
        CollapseDetector(),
        RoundProgress(),
        RunResult(),
        RunReport(),
    ]
    if run.settings.system is not None:
        defaults.append(SystemClock())
    if not run.settings.fast_dev_run:
        defaults.append(FederatedCheckpoint())
    return callback_list.choose(user_callbacks, needed, defaults)


def check_monitors(
    hooks: Hooks,
    algorithm: FederatedAlgorithm,
    datamodule: FederatedDataModule,
    metrics: Collection[str],
) -> None:
    """Refuse a monitor of an evaluation before the first round, where its scalars are known.

    Args:
        hooks: The callbacks of the run.
        algorithm: The method.
        datamodule: The data.
        metrics: The names of the run's metrics.

    Raises:
        ValueError: See :func:`~lightning_fedssl.trainer.callback_list.check_monitors`.
    """
    adding = hooks.listeners["on_evaluation_end"]
    are_ours = all(type(one).__module__.startswith("lightning_fedssl.") for one in adding)
    if are_ours and type(algorithm).validation_step is FederatedAlgorithm.validation_step:
        names = ("loss", *metrics) if datamodule.has_validation else ()
        scalars = {f"val/{name}" for name in names}
        callback_list.check_monitors(hooks.callbacks, scalars, place="val")
