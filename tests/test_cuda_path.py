"""Every method on the pretend CUDA device computes what it computes on the CPU, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend_cuda.process import run_tests


def test_steps_that_a_graph_would_repeat_wrongly_are_found(pretend_driver: Path) -> None:
    run_tests(pretend_driver, "tests/pretend_cuda/device_faults.py")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequential", "stacked", "graphs", "others"])
def test_methods_on_the_device(pretend_driver: Path, mode: str) -> None:
    computes = "test_the_device_computes_what_the_cpu_does"
    chosen = f"not {computes}" if mode == "others" else f"{computes} and {mode}"
    run_tests(pretend_driver, "tests/pretend_cuda/device_methods.py", "-k", chosen)
