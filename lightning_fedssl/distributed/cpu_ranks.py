"""The number of ranks for the processor cores of a machine."""

from __future__ import annotations

import os
import sys

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

FEW_RANKS = 4
"""Ranks that may share cores, to try on a small machine whether a method gives the same result on
several ranks."""


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_ranks() -> tuple[int, int] | None:
    """Ranks on this machine and machines, if torchrun, SLURM or Lightning has started the ranks;
    otherwise None.
    """
    if "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return local, world // local
    if SLURMEnvironment.detect():
        machines = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // machines, machines
    return None


def ranks_of_cores(stacks: int) -> int:
    """The largest number of ranks with cores for the threads of each, and a stack of clients for
    each.

    Args:
        stacks: Stacks of clients in a round: its clients, where these train one after another.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(usable_cores() // (int(threads) if threads.isdecimal() else 1), stacks))


def refuse_too_many(ranks: int) -> None:
    """Refuse more ranks than cores on this machine, except for a few.

    Raises:
        ValueError: If there are too many.
    """
    if ranks > max(usable_cores(), FEW_RANKS):
        raise ValueError(
            f"trainer.devices is {ranks}: on a CPU these are processes, and this machine has "
            f"{usable_cores()} processor cores for them; give fewer, or auto"
        )


def may_use_all_cores() -> bool:
    """Whether a command may use all cores unasked: a CPU whose ranks can be forked, and that nobody
    has shared out.

    OMP_NUM_THREADS says how many cores a process is to use. ``compare`` sets it for every run,
    because runs, too, can be trained at the same time.
    """
    cpu = sys.platform == "linux" and not torch.cuda.is_available()
    return cpu and started_ranks() is None and "OMP_NUM_THREADS" not in os.environ
