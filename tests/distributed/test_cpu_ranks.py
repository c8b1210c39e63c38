"""The number of ranks for a machine's cores."""

from __future__ import annotations

import pytest
import torch

from lightning_fedssl.distributed import cpu_ranks

TORCHRUN = {"LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 8)
    for name in (*TORCHRUN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("threads", "stacks", "ranks"), [(None, 10, 8), (None, 3, 3), ("4", 10, 2), ("16", 10, 1), (None, 0, 1)]
)
def test_a_rank_for_the_cores_of_its_threads(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, stacks: int, ranks: int
) -> None:
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert cpu_ranks.ranks_of_cores(stacks) == ranks


@pytest.mark.parametrize(
    ("variables", "started"),
    [
        ({}, None),
        (TORCHRUN, (3, 2)),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (2, 1)),  # Lightning's own scripts
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}, (2, 2)),
    ],
)
def test_ranks_that_a_launcher_has_started(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], started: tuple[int, int] | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cpu_ranks.started_ranks() == started
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_ranks.may_use_all_cores() == (started is None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cores are shared out
    assert not cpu_ranks.may_use_all_cores()


def test_more_ranks_than_cores_are_refused_except_for_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"trainer\.devices is 9: .* this machine has 8 processor cores"):
        cpu_ranks.refuse_too_many(9)
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 1)
    cpu_ranks.refuse_too_many(cpu_ranks.FEW_RANKS)
