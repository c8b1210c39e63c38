"""The start of a command: Fabric, the threads of the CPU, the ranks, and what spawned processes return."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators.cuda import CUDAAccelerator
from lightning.fabric.accelerators.mps import MPSAccelerator
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import Tensor

from lightning_fedssl.distributed import collectives, cpu_ranks, rank_watch
from lightning_fedssl.distributed.forked_ranks import ForkedRanks, can_fork
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.trainer import checkpointing

_log = logging.getLogger(__name__)


class Outcome(TypedDict):
    """The outcome of a command, which a spawned process sends to its parent.

    Attributes:
        metrics: The scalars that the command returns.
        model: The global model.
        round: The last round.
        predictions: Class probabilities, after ``predict``.
        predictions_file: The file that they were written to.
        log_dir: The folder of the run.
        status: How the command ended, as Lightning calls it.
        callback_metrics: The last value of every scalar.
    """

    metrics: dict[str, float]
    model: State
    round: int
    predictions: Tensor | None
    predictions_file: str | None
    log_dir: str | None
    status: str
    callback_metrics: dict[str, float]


_MODEL_SPLITTING = ("fsdp", "deepspeed", "xla", "modelparallel", "model_parallel")


def make_fabric(accelerator: str, devices: Any, num_nodes: int, strategy: Any, precision: Any, stacks: int) -> Fabric:
    """Fabric for these settings; if they give several devices, ``strategy: auto`` is Fabric's own choice, ddp.

    Args:
        accelerator: As Fabric's.
        devices: As Fabric's; on a CPU ``auto``, which is 1 in Fabric, is :func:`cpu_ranks.plan_ranks`. None is one GPU;
            on a CPU, where ranks can be forked, at most as many as with ``auto``: :func:`use_ranks` says how many.
        num_nodes: As Fabric's.
        strategy: As Fabric's.
        precision: As Fabric's.
        stacks: Stacks that a CPU's ranks share in a round: its clients, where these train one after another.

    Raises:
        ValueError: If they are not available on this machine, naming the keys; if the strategy splits one model over
            devices; or if a CPU has too few cores for the ranks.
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
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not CUDAAccelerator.is_available())
    if devices == "auto" and on_cpu:
        devices = cpu_ranks.plan_ranks(stacks, num_nodes)
    elif devices is None:
        devices = 1
        if on_cpu and strategy == "auto" and num_nodes == 1 and cpu_ranks.may_choose() and can_fork():
            devices = cpu_ranks.ranks_for(cpu_ranks.usable_cores(), 1, stacks)
            strategy = ForkedRanks(optional=True) if devices > 1 else strategy
    if on_cpu and str(devices).isdecimal():
        cpu_ranks.refuse_too_many(int(devices))
    if strategy == "forked":
        if not (on_cpu and can_fork()):
            raise ValueError(
                "trainer.strategy is forked: processes can be forked on Linux, without a CUDA device, and with "
                "trainer.accelerator cpu; use ddp"
            )
        strategy = ForkedRanks()
    try:
        fabric = Fabric(
            accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy, precision=precision
        )
    except Exception as error:
        settings = f"accelerator {accelerator}, devices {devices}, strategy {name}, precision {precision}"
        raise ValueError(f"trainer: {settings} are not available on this machine: {error}") from error
    # Lightning's ModelCheckpoint calls this method of the strategy; Fabric's strategies have no such method.
    vars(fabric.strategy)["remove_checkpoint"] = checkpointing.remove
    return fabric


def use_ranks(fabric: Fabric, wanted: Callable[[], bool]) -> None:
    """Set whether the next command uses several ranks, where the user has left the choice open.

    Args:
        fabric: As :func:`make_fabric` made it.
        wanted: Whether several ranks pay.
    """
    strategy = fabric.strategy
    if isinstance(strategy, ForkedRanks) and strategy.optional:
        strategy.ranks = None if wanted() else 1
        if strategy.num_processes > 1:
            _log.info(
                "%d processes train the clients, each on one processor core; the result equals that of one process "
                "(--trainer.devices 1)", strategy.num_processes,
            )  # fmt: skip


class Launcher:
    """Runs commands on all ranks: this process, processes that were started like it, or spawned processes.

    Args:
        fabric: The ranks.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._launched = False

    def run(self, command: Callable[..., Outcome], *arguments: Any) -> Outcome:
        """Call ``command(fabric, *arguments)`` on every rank, and return what it returns on this one, or on rank 0.

        Args:
            command: A function of a module, so that it can be sent to spawned processes.
            *arguments: Its arguments after the first.
        """
        launch: Callable[..., Any] = self.fabric.launch
        if isinstance(self.fabric.strategy, ForkedRanks):
            forked: Outcome = launch(_run_forked, command, *arguments)
            return forked
        if spawns(self.fabric):
            with TemporaryDirectory() as folder:
                launch(_run_spawned, Path(folder), command, *arguments)
                return load_outcome(Path(folder))
        if self._launched:
            return _run_watched(self.fabric, command, *arguments)
        self._launched = True
        connected = rank_watch.end_with_the_launcher()
        try:
            outcome: Outcome = launch(_run_connected, connected, command, *arguments)
        finally:
            connected.set()
        collectives.leave_at_exit()
        return outcome


def needs_several(fabric: Fabric) -> bool:
    """Whether every command runs on several ranks, or in a process of its own."""
    strategy = fabric.strategy
    several = len(getattr(strategy, "parallel_devices", None) or [0]) > 1
    return spawns(fabric) or (several and not (isinstance(strategy, ForkedRanks) and strategy.optional))


def spawns(fabric: Fabric) -> bool:
    """Whether the strategy runs the ranks in processes that it spawns, so that results must be sent back."""
    return isinstance(fabric.strategy.launcher, _MultiProcessingLauncher)


def _run_watched(fabric: Fabric, command: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """Run a command; the death of another rank ends it with an error that names the rank."""
    with rank_watch.RankWatch(fabric):
        return command(fabric, *arguments)


def _run_connected(
    fabric: Fabric, connected: threading.Event, command: Callable[..., Outcome], *arguments: Any
) -> Outcome:
    """Run a command in a process that a launcher has started."""
    connected.set()
    return _run_watched(fabric, command, *arguments)


def _run_forked(fabric: Fabric, command: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """Run a command on ranks that exist for this command only."""
    outcome = _run_watched(fabric, command, *arguments)
    collectives.leave(fabric)
    return outcome


def _run_spawned(fabric: Fabric, folder: Path, command: Callable[..., Outcome], *arguments: Any) -> None:
    """Run a command in a spawned process; rank 0 leaves the outcome in a folder of the parent process."""
    outcome = _run_watched(fabric, command, *arguments)
    if fabric.is_global_zero:
        save_outcome(outcome, folder)
    collectives.leave(fabric)


def save_outcome(outcome: Outcome, folder: Path) -> None:
    """Write an outcome to a file: tensors sent through a queue are lost when the process that sent them ends."""
    torch.save(outcome, folder / "outcome.pt")


def load_outcome(folder: Path) -> Outcome:
    """The outcome that :func:`save_outcome` wrote, on the CPU."""
    outcome: Outcome = torch.load(folder / "outcome.pt", map_location="cpu", weights_only=True)
    return outcome


@contextmanager
def settings_of(device: torch.device) -> Iterator[None]:
    """On a CPU use one thread, unless OMP_NUM_THREADS is set; the previous number afterwards.

    Steps of ten images gain little from a second thread and lose much when another program needs the core: 13 times was
    measured, as threads wait for each other in a loop. More threads also sum in another order, so that the result would
    depend on the number of cores. Use more ranks to use more cores: ``devices: auto``.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_float32_matmul_precision(precision: str | None) -> None:
    """Set the precision of matrix products of 32-bit numbers; None leaves PyTorch's setting.

    Raises:
        ValueError: If PyTorch does not know the precision.
    """
    if precision not in (None, "highest", "high", "medium"):
        raise ValueError(f"trainer.float32_matmul_precision is {precision}: give highest, high or medium")
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def set_benchmark(benchmark: bool | None, deterministic: bool) -> None:
    """Let cuDNN try its algorithms for each shape, as Lightning does; None leaves PyTorch's setting."""
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark and not deterministic


def set_deterministic(deterministic: bool) -> None:
    """Make PyTorch use deterministic kernels, as Lightning does."""
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
