"""Fabric, the ranks of a command, and what processes that it starts report to the one that called
it.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators.cuda import CUDAAccelerator
from lightning.fabric.accelerators.mps import MPSAccelerator

from lightning_fedssl.distributed import cpu_ranks
from lightning_fedssl.distributed.signals import RankSignals, SignalHandler, interruption
from lightning_fedssl.storage import checkpoint_file

FULL = "32-full"
"""The precision that is Fabric's 32-true without TF32."""

_MODEL_SPLITTING = ("fsdp", "deepspeed", "xla", "modelparallel", "model_parallel")


def make_fabric(
    accelerator: str, devices: Any, strategy: Any, precision: Any, stacks: int
) -> Fabric:
    """Fabric for these settings.

    Args:
        accelerator: As Fabric's.
        devices: As Fabric's; None is one. ``auto`` on a CPU, which is 1 in Fabric, is as many as
            there are cores or stacks.
        strategy: As Fabric's; on a CPU under Linux ``auto`` forks the ranks (``ddp_fork``).
        precision: As Fabric's.
        stacks: Stacks that a CPU's ranks share in a round: its clients, where these train one after
            another.

    Raises:
        ValueError: If they are not available on this machine, naming the keys; if the strategy
            splits one model over devices; or if a CPU has too few cores for the ranks.
    """
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if any(word in name.lower() for word in _MODEL_SPLITTING):
        raise ValueError(
            f"trainer.strategy is {name}: it splits one large model over devices, but here devices "
            "train different clients of a small model; use auto or ddp"
        )
    if accelerator == "auto" and MPSAccelerator.is_available():
        accelerator = "cpu"  # mps has no 64-bit sums
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not CUDAAccelerator.is_available())
    started = cpu_ranks.started_ranks()
    if devices is None:
        devices = 1
    elif devices == "auto" and on_cpu:
        devices = started[0] if started else cpu_ranks.ranks_of_cores(stacks)
    if on_cpu and not started and str(devices).isdecimal():
        cpu_ranks.refuse_too_many(int(devices))
        if strategy == "auto" and int(devices) > 1 and sys.platform == "linux":
            strategy = "ddp_fork"
    logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.WARNING)
    try:
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=started[1] if started else 1,
            strategy=strategy,
            precision="32-true" if precision == FULL else precision,
        )
    except Exception as error:
        raise ValueError(
            f"trainer: accelerator {accelerator}, devices {devices}, strategy {name}, precision "
            f"{precision} are not available on this machine: {error}"
        ) from error
    # Lightning's ModelCheckpoint calls this method of the strategy; Fabric's strategies have no
    # such method.
    vars(fabric.strategy)["remove_checkpoint"] = checkpoint_file.remove
    return fabric


def forks(fabric: Fabric) -> bool:
    """Whether the ranks are forked from this process for each command."""
    launcher = fabric.strategy.launcher
    return launcher is not None and launcher.is_interactive_compatible


class Report:
    """What a command reports to the process that called it, if Fabric runs it in processes that it
    forks or spawns.

    Tensors that are sent through a queue are lost when the process that sent them ends, so rank 0
    writes a file.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: str) -> None:
        self._outcome = Path(folder, "outcome.pt")
        self._error = Path(folder, "error.pickle")
        self._begun = Path(folder, "begun")
        self._caller = os.getpid()
        self._is_here = False

    @contextmanager
    def by(self, fabric: Fabric, outcome: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Inside, a rank runs the command.

        An error is reported, or its outcome, if this is another process.

        Args:
            fabric: The ranks.
            outcome: Gives the outcome, as tensors and plain values.
        """
        if not fabric.is_global_zero:  # which logs for all
            logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
        if os.getpid() == self._caller:
            self._is_here = True
            yield
            return
        # The caller's threads are not in a forked process, so none may be waited for.
        torch.set_num_threads(1)
        try:
            with SignalHandler():
                yield
        except Exception as error:
            # The first error is the cause of the others; some errors cannot be pickled.
            with suppress(Exception), self._error.open("xb") as file:
                file.write(pickle.dumps(error))
            raise
        if fabric.is_global_zero:
            torch.save(outcome(), self._outcome)
        if fabric.world_size > 1:
            fabric.barrier()
            torch.distributed.destroy_process_group()

    def begin(self) -> None:
        """A rank calls this when a signal lets every rank finish its round."""
        self._begun.touch()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """In the calling process: signals reach the ranks, and their error is raised here."""
        signals = RankSignals(self._begun, lambda: self._is_here or os.getpid() != self._caller)
        try:
            with signals:
                yield
        except Exception:
            if self._error.exists() and self._error.stat().st_size:
                raise pickle.loads(self._error.read_bytes()) from None
            if signals.number:  # the ranks had finished their last round, and have ended at once
                raise interruption(signals.number) from None
            raise

    def outcome(self) -> dict[str, Any] | None:
        """The outcome of a command that has run in other processes, on the CPU; None if it has run
        in this one.
        """
        if not self._outcome.exists():
            return None
        outcome: dict[str, Any] = torch.load(self._outcome, map_location="cpu", weights_only=True)
        return outcome


@contextmanager
def report() -> Iterator[Report]:
    """A report for one command."""
    with TemporaryDirectory() as folder:
        yield Report(folder)


@contextmanager
def settings(
    device: torch.device, deterministic: bool | Literal["warn"], precision: str
) -> Iterator[None]:
    """Deterministic kernels and TF32 if they are wanted, and one thread on a CPU unless
    OMP_NUM_THREADS is set.

    Steps of ten images gain little from a second thread and lose much when another program needs
    the core: 13 times was measured, as threads wait for each other in a loop. More threads also sum
    in another order, so that the result would depend on the number of cores. Use more ranks to use
    more cores: ``devices: auto``.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != FULL
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    unset = device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ
    if unset:
        os.environ["OMP_NUM_THREADS"] = "1"  # so that Fabric does not choose another number
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
            torch.set_num_threads(threads)
