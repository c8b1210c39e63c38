"""The seed that ``seed_everything: true`` draws."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

_OF_A_RANK = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Variables that tell a process which rank of a job it is."""

_NUMBER_OF_RANKS = ("WORLD_SIZE", "SLURM_NTASKS")


def draw_seed(variables: Mapping[str, str]) -> int:
    """Draw a seed and log it; a rank that another process has started takes the one that it inherits.

    Lightning draws none: it takes ``PL_GLOBAL_SEED``, or 0. It sets this variable when it seeds the first process, and
    the ranks that this process starts inherit it. Ranks that torchrun or SLURM starts have no common draw.

    Args:
        variables: The environment.

    Raises:
        ValueError: In a rank of a job without ``PL_GLOBAL_SEED``.
    """
    if any(name in variables for name in _OF_A_RANK) and not _is_alone(variables):
        if "PL_GLOBAL_SEED" not in variables:
            raise ValueError(
                "seed_everything is true, but the ranks of this job would draw different seeds: give a whole number"
            )
        return int(variables["PL_GLOBAL_SEED"])
    seed = int.from_bytes(os.urandom(4), "little")  # NumPy accepts no larger one
    logging.getLogger(__name__).info("seed_everything: %d was drawn; --seed_everything %d repeats the run", seed, seed)
    return seed


def _is_alone(variables: Mapping[str, str]) -> bool:
    """Whether the job has one rank."""
    return {variables[name] for name in _NUMBER_OF_RANKS if name in variables} == {"1"}
