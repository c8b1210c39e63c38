"""Every method on the pretend CUDA device computes what it computes on the CPU, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend_cuda.budgets import table
from tests.pretend_cuda.process import ROOT, run_tests

FOLDER = "tests/pretend_cuda"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_methods_on_the_device(pretend_driver: Path, part: str) -> None:
    """Every second method in one process, in which the modes of a method share their run on the CPU."""
    run_tests(pretend_driver, f"{FOLDER}/device_methods.py", "--part", part)


@pytest.mark.slow
def test_ranks_and_steps_that_a_graph_would_repeat_wrongly(pretend_driver: Path) -> None:
    """The ranks come first: they are forked, which no process can do that has trained."""
    run_tests(pretend_driver, f"{FOLDER}/device_ranks.py", f"{FOLDER}/device_faults.py")


def test_the_documentation_says_how_often_the_host_waits() -> None:
    assert table() in (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
