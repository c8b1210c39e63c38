"""Every method trains on the emulated CUDA device, in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize("chosen", ["rules or semifl-", pytest.param("not semifl-", marks=pytest.mark.slow)])
def test_every_method_computes_on_the_device_what_it_computes_on_the_cpu(tmp_path: Path, chosen: str) -> None:
    """Skipped where there is no C compiler, or no CUDA build of PyTorch."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or torch.version.cuda is None:
        pytest.skip("the emulated CUDA device needs a C compiler (cc) and a build of PyTorch with CUDA")
    library = tmp_path / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([compiler, *options, str(HERE / "driver.c")], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    command.append(str(HERE / "on_device.py"))
    result = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout[-12000:]
    assert re.search(r"^\d+ passed(, \d+ deselected)? in", result.stdout, re.M), result.stdout[-3000:]
