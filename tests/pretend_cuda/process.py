"""Runs pytest in a process of its own, in which a small library answers for the CUDA driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def build_driver(folder: Path) -> Path:
    """Compile the library; the test is skipped where there is no C compiler, or no CUDA build of PyTorch.

    Args:
        folder: Where it is written.
    """
    import torch

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("the pretend CUDA device needs a C compiler (cc)")
    if torch.version.cuda is None:
        pytest.skip("the pretend CUDA device needs a build of PyTorch with CUDA")
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([compiler, *options, str(HERE / "driver.c")], check=True)
    return library


def run_with(driver: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the driver answers.

    Args:
        driver: What :func:`build_driver` gave.
        command: The arguments of the interpreter.
    """
    environment = {**os.environ, "LD_PRELOAD": str(driver), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_tests(driver: Path, *arguments: str) -> None:
    """Run test files on the pretend device; all must pass, and none may be skipped.

    Args:
        driver: What :func:`build_driver` gave.
        arguments: Files and options of pytest.
    """
    result = run_with(driver, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments)
    summary = next((line for line in reversed(result.stdout.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    passed = result.returncode == 0 and "passed" in summary and "skipped" not in summary
    assert passed, f"on the pretend CUDA device:\n{result.stdout[-12000:]}"
