"""The start of a command: Fabric, CPU threads, and what spawned processes return."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators.cuda import CUDAAccelerator
from lightning.fabric.accelerators.mps import MPSAccelerator
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import Tensor

from lightning_fedssl.distributed import cpu_ranks
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.trainer import checkpointing


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


def set_deterministic(deterministic: bool) -> None:
    """Ask for deterministic kernels, as Lightning does."""
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
