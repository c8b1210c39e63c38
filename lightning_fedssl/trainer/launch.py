"""What a trainer stands on: Fabric, loggers, and the callbacks it accepts."""

from __future__ import annotations

import csv
import difflib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypedDict

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators.cuda import CUDAAccelerator
from lightning.fabric.accelerators.mps import MPSAccelerator
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.distributed import cpu_ranks
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.trainer import checkpointing

_log = logging.getLogger(__name__)

SUPPORTED_LIGHTNING_CALLBACKS = (EarlyStopping, ModelCheckpoint, Timer, LambdaCallback, SaveConfigCallback)
"""Lightning's own callbacks that run here, with a round as the epoch; others of Lightning's are refused by name."""

LIGHTNING_HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end",
    "on_train_end", "on_fit_end", "on_exception",
)  # fmt: skip
"""Those of Lightning's hooks that a federated run calls, beside ``setup`` and ``teardown``."""


class Outcome(TypedDict):
    """What a command came to in spawned processes.

    Attributes:
        model: The global model.
        round: The last round.
        predictions: Class probabilities, after ``predict``.
        callback_metrics: The last value of every scalar.
    """

    model: State
    round: int
    predictions: Tensor | None
    callback_metrics: dict[str, float]


_MODEL_SPLITTING = ("fsdp", "deepspeed", "xla", "modelparallel", "model_parallel")


def make_fabric(accelerator: str, devices: Any, num_nodes: int, strategy: Any, precision: Any, clients: int) -> Fabric:
    """Fabric for these settings; where they end in several devices, ``strategy: auto`` is Fabric's own choice, ddp.

    Args:
        accelerator: As Fabric's.
        devices: As Fabric's; on a CPU ``auto``, which there is 1 to Fabric, is :func:`cpu_ranks.plan_ranks`.
        num_nodes: As Fabric's.
        strategy: As Fabric's.
        precision: As Fabric's.
        clients: Clients of a round, which the ranks share.

    Raises:
        ValueError: If they are not to be had here, naming the keys; or if the strategy splits one model over devices.
    """
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if any(word in name.lower() for word in _MODEL_SPLITTING):
        raise ValueError(
            f"trainer.strategy is {name}: it splits one large model over devices, but here devices train different "
            "clients of a small model; use auto or ddp"
        )
    if accelerator == "mps" or (accelerator == "auto" and MPSAccelerator.is_available()):
        if accelerator == "mps":
            raise ValueError("trainer.accelerator is mps, which has no 64-bit sums; use cpu")
        accelerator = "cpu"
    if devices == "auto" and (accelerator == "cpu" or (accelerator == "auto" and not CUDAAccelerator.is_available())):
        devices = cpu_ranks.plan_ranks(clients, num_nodes)
    try:
        fabric = Fabric(
            accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy, precision=precision
        )
    except Exception as error:
        settings = f"accelerator {accelerator}, devices {devices}, strategy {name}, precision {precision}"
        raise ValueError(f"trainer: {settings} cannot be had here: {error}") from error
    # Lightning's ModelCheckpoint asks the strategy for this; Fabric's strategies have no such method.
    vars(fabric.strategy)["remove_checkpoint"] = checkpointing.remove
    return fabric


def spawns(fabric: Fabric) -> bool:
    """Whether the strategy runs the ranks in processes that it spawns, so that results must be sent back."""
    return isinstance(fabric.strategy.launcher, _MultiProcessingLauncher)


@contextmanager
def threads_for(device: torch.device) -> Iterator[None]:
    """On a CPU one thread a process, unless OMP_NUM_THREADS says otherwise; the previous number afterwards.

    Steps of ten images gain little from a second thread, lose much when another program wants the core (13 times was
    measured, as threads wait for each other in a loop), and sum in another order on a machine with other cores. More
    cores are used by more ranks: ``devices: auto``.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def save_outcome(outcome: Outcome, folder: Path) -> None:
    """Leave an outcome for the parent process: tensors sent through a queue would need their sender to live on."""
    torch.save(outcome, folder / "outcome.pt")


def load_outcome(folder: Path) -> Outcome:
    """What :func:`save_outcome` left, on the CPU."""
    outcome: Outcome = torch.load(folder / "outcome.pt", map_location="cpu", weights_only=True)
    return outcome


def reserve_version(root: str) -> int:
    """Make the next free folder ``lightning_logs/version_N``, so that no run started meanwhile takes it; gives N."""
    folder = Path(root) / "lightning_logs"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdecimal()]
    for version in count(max(numbers, default=-1) + 1):
        try:
            (folder / f"version_{version}").mkdir()
        except FileExistsError:
            continue
        return version
    raise AssertionError("there is no last number")


def default_loggers(root: str, version: int) -> list[Logger]:
    """TensorBoard and CSV in one folder below ``root``."""
    board = TensorBoardLogger(root, version=version, default_hp_metric=False)
    return [board, CSVLogger(root, version=version, flush_logs_every_n_steps=1)]


def as_list(logger: Logger | list[Logger] | None) -> list[Logger]:
    """The user's loggers."""
    return [] if logger is None else [logger] if isinstance(logger, Logger) else list(logger)


def set_deterministic(deterministic: bool) -> None:
    """Ask for deterministic kernels, as Lightning does."""
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def refuse_unsupported(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks of Lightning's that cannot work here, and hooks that do not exist.

    Raises:
        ValueError: Naming the callback and those that can be used, or the hook and the one that was meant.
    """
    for callback in callbacks:
        known = isinstance(callback, (FederatedCallback, *SUPPORTED_LIGHTNING_CALLBACKS))
        if not known and type(callback).__module__.startswith(("lightning.", "pytorch_lightning.")):
            supported = ", ".join(c.__name__ for c in SUPPORTED_LIGHTNING_CALLBACKS[:-1])
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} needs Lightning's own training loop and cannot run in "
                f"a federated one; of Lightning's callbacks these can: {supported}"
            )
        if not known or isinstance(callback, FederatedCallback):
            _check_hooks(callback)
        if isinstance(callback, Timer):
            callback._interval = Interval.epoch  # it looks at the clock once a round, whatever interval it was given


def _check_hooks(callback: Callback) -> None:
    """A hook that is never called must not pass in silence."""
    mine = type(callback).__name__
    for name in (name for name in dir(type(callback)) if name.startswith("on_")):
        if not hasattr(FederatedCallback, name):
            meant = difflib.get_close_matches(name, [n for n in dir(FederatedCallback) if n.startswith("on_")], 1)
            hint = f"; did you mean {meant[0]}?" if meant else "; see lightning_fedssl.callback for those there are"
            raise ValueError(f"trainer.callbacks: {mine} has a method {name}, and there is no hook of that name{hint}")
        if name not in LIGHTNING_HOOKS and hasattr(Callback, name) and overrides(callback, name):
            _log.warning("callback %s overrides %s, which a federated run never calls", mine, name)


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback does something in a hook; also one set on the instance, or of a callback without our base.

    Raises:
        AttributeError: If there is no hook of that name.
    """
    no_ops = {getattr(FederatedCallback, hook), getattr(Callback, hook, None)}
    method = getattr(callback, hook, None)
    return method is not None and getattr(method, "__func__", method) not in no_ops


def prefer_fused(optimizer: Optimizer) -> Optimizer:
    """Use the optimizer's fused kernel where it has one and the user chose nothing."""
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and group.get("foreach") is None and not group.get("differentiable"):
            group["fused"] = True
    return optimizer


def write_predictions(probabilities: Tensor, path: Path) -> None:
    """Write the most probable class and all probabilities of each image as CSV.

    Args:
        probabilities: ``(images, classes)``.
        path: The file; its folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "prediction", *(f"probability_{k}" for k in range(probabilities.shape[1]))])
        for index, (best, row) in enumerate(zip(probabilities.argmax(1).tolist(), probabilities.tolist(), strict=True)):
            writer.writerow([index, best, *(f"{p:.6g}" for p in row)])
