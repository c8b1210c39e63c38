"""The GPU benchmark runs: on a CPU with tiny sizes, and without packages that a bare GPU machine may lack."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = {"agree", "ceilings", "engines", "curve", "round", "pfl"}

BARE = textwrap.dedent("""
    import importlib.metadata, runpy, sys
    absent = {"jsonargparse", "scikit-learn", "timm", "hypothesis"}
    for module in ("jsonargparse", "sklearn", "timm", "hypothesis"):
        sys.modules[module] = None
    real = {name: getattr(importlib.metadata, name) for name in ("version", "distribution")}
    def hide(name):
        def found(package):
            if package in absent:
                raise importlib.metadata.PackageNotFoundError(package)
            return real[name](package)
        setattr(importlib.metadata, name, found)
    hide("version"), hide("distribution")
    sys.argv = sys.argv[1:]
    sys.path.insert(0, "benchmarks")
    runpy.run_path(sys.argv[0], run_name="__main__")
""")


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, "benchmarks/gpu.py", "--repeats", "1", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}, text=True, capture_output=True,
    )  # fmt: skip


@pytest.mark.slow
def test_every_part_runs_and_engines_agree(tmp_path: Path) -> None:
    result = benchmark("--device", "cpu", "--tiny", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} == PARTS
    assert all(float(row["value"]) >= 0 for row in rows)
    exact = [float(row["value"]) for row in rows if row["case"].startswith(("float64", "64-true"))]
    assert len(exact) == 3
    assert max(exact) < 1e-10
    rates = {row["case"] for row in rows if row["part"] == "engines" and row["unit"] == "client steps/s"}
    assert {"sequential, 32-true", "sequential graph, 32-true", "vectorised graph, bf16-mixed"} <= rates
    phases = [row for row in rows if row["part"] == "round" and row["case"].startswith("vectorised graph, 32-true")]
    whole, *parts = (float(row["value"]) for row in phases)
    assert len(parts) == 7
    assert sum(parts) < 1.5 * whole
    report = (tmp_path / "gpu.md").read_text()
    assert all(f"## {part}, CPU" in report for part in PARTS)
    assert (tmp_path / "gpu.png").stat().st_size > 1000


def test_no_measurement_begins_after_the_budget_and_no_gpu_is_said() -> None:
    assert (
        benchmark("--device", "cpu", "--tiny", "--budget-s", "0", "--output", "/nonexistent").stdout.count("no time")
        == 6
    )
    result = benchmark()
    assert result.returncode == 1
    assert "there is no CUDA device: give --device cpu --tiny" in result.stderr
