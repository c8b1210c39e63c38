"""The number of ranks for the processor cores of a machine."""

from __future__ import annotations

import logging
import os

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

_log = logging.getLogger(__name__)


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_for(cores: int, threads: int, stacks: int) -> int:
    """The largest number of ranks with a core for each thread and a stack of clients for each rank.

    Args:
        cores: Processor cores.
        threads: Threads of a rank.
        stacks: Stacks of clients that a machine trains in a round.
    """
    return max(1, min(cores // threads, stacks))


def plan_ranks(stacks: int, num_nodes: int) -> int:
    """The number of ranks on this machine for ``devices: auto`` on a CPU; it is logged.

    If a launcher (torchrun, SLURM) has started the ranks, it is their number.

    Args:
        stacks: Stacks of a round: its clients, where these train one after another.
        num_nodes: Machines that share them.
    """
    if (started := _started()) is not None:
        return max(1, started // num_nodes)
    cores = usable_cores()
    ranks = ranks_for(cores, _threads_of_a_rank(), -(-stacks // num_nodes))
    _log.info(
        "trainer.devices is auto; ranks: %d, processor cores: %d, clients or stacks a round: %d", ranks, cores, stacks
    )
    return ranks


FEW_RANKS = 4
"""Ranks that may share cores, to try on a small machine whether a method gives the same result on several ranks."""


def refuse_too_many(ranks: int) -> None:
    """Refuse more ranks than cores on this machine, except for a few and for those that a launcher has started.

    Args:
        ranks: ``trainer.devices`` on a CPU.

    Raises:
        ValueError: If there are too many.
    """
    cores = usable_cores()
    if _started() is None and ranks > max(cores, FEW_RANKS):
        raise ValueError(
            f"trainer.devices is {ranks}: on a CPU these are processes, and this machine has {cores} processor "
            f"{'core' if cores == 1 else 'cores'} for them; give at most {cores}, or auto"
        )


def may_choose() -> bool:
    """Whether the number of ranks is open: no launcher has started ranks, and OMP_NUM_THREADS is not set.

    OMP_NUM_THREADS says how many cores a process is to use. ``compare`` sets it to 1 for every run, because runs, too,
    can be trained at the same time.
    """
    return _started() is None and "OMP_NUM_THREADS" not in os.environ


WORTH_STEPS = 500
"""Client steps of a run from which several ranks are used; to start them takes as long as about 50 steps of a CNN."""


def _threads_of_a_rank() -> int:
    """OMP_NUM_THREADS if it is set, else one, because more ranks speed up a run more than more threads."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def _started() -> int | None:
    """The number of ranks that torchrun, SLURM or Lightning has started on all machines; None without them."""
    if "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ["SLURM_NTASKS"]) if SLURMEnvironment.detect() else None
