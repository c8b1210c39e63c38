"""The GPU benchmark runs: on a CPU with tiny sizes, and without packages that a bare GPU machine may lack.

What it does where there is a GPU, and where a measurement fails there, is tried with stubs.
"""

from __future__ import annotations

import csv
import importlib
import math
import os
import re
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus

from tests.forked_command import ForkedCommand
from tests.pretend_cuda.process import run_with

ROOT = Path(__file__).parent.parent
PARTS = {"agree", "ceilings", "engines", "curve", "round", "pfl"}

BARE = """
import runpy, sys
from tests.pretend_cuda.bare import hide_packages
hide_packages("jsonargparse", "scikit-learn", "timm", "hypothesis")
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, "benchmarks/gpu.py", "--repeats", "1", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}, text=True, capture_output=True,
    )  # fmt: skip


def rows_of(output: Path) -> list[dict[str, str]]:
    with (output / "gpu.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def check_phases(rows: list[dict[str, str]]) -> None:
    """The parts of a round are six, and take together about as long as the round."""
    phases = [row for row in rows if row["part"] == "round" and row["case"].startswith("vectorised graph, 32-true")]
    whole, *parts = (float(row["value"]) for row in phases)
    assert len(parts) == 6
    assert sum(parts) < 1.5 * whole


@pytest.mark.slow
def test_it_runs_on_a_cpu_without_packages_that_a_machine_may_lack(tmp_path: Path) -> None:
    """The other parts need the same packages; they run on the pretend CUDA device below."""
    parts = ["agree", "ceilings", "round"]
    result = benchmark("--device", "cpu", "--tiny", "--part", *parts, "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path)
    assert {row["part"] for row in rows} == set(parts)
    assert all(float(row["value"]) >= 0 for row in rows)
    exact = [float(row["value"]) for row in rows if row["case"].startswith(("float64", "64-true"))]
    assert len(exact) == 3
    assert max(exact) < 1e-10
    check_phases(rows)
    assert not any("NOT RECORDED" in row["case"] for row in rows)
    report = (tmp_path / "gpu.md").read_text()
    assert all(f"## {part}, CPU" in report for part in parts)


WRAPPER = """#!/bin/sh
export LD_PRELOAD={driver} OMP_NUM_THREADS=1
unset CUDA_VISIBLE_DEVICES
case "$1" in
-m) shift 2; exec {python} -m pytest -p tests.pretend_cuda.plugin -k "not resnet9 and not wrn and not bn-SemiFL" "$@" ;;
*) exec {python} -m tests.pretend_cuda.script "$@" ;;
esac
"""
"""A Python in which there is a pretend CUDA device, and no jsonargparse; it leaves out tests of larger networks."""


@pytest.mark.slow
def test_make_gpu_runs_on_the_pretend_cuda_device_and_resumes(pretend_driver: Path, tmp_path: Path) -> None:
    """With the packages of a Python that is there: nothing is installed. What has been measured is not measured again.

    The parts after the first are run in one process, as each process imports PyTorch anew.
    """
    python = tmp_path / "python"
    python.write_text(WRAPPER.format(driver=pretend_driver, python=sys.executable))
    python.chmod(0o755)
    output = tmp_path / "gpu"
    settings = [f"PYTHON={python}", f"GPU={output}", "GPU_OPTIONS=--tiny --repeats 1"]

    def make(*arguments: str) -> str:
        command = ["make", "gpu", *settings, *arguments]
        own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=own)
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
        return result.stdout

    printed = make("GPU_PARTS=tests agree")
    assert "pip" not in printed
    passed = re.search(r"(\d+) passed", (output / "tests.txt").read_text())
    assert passed is not None
    assert int(passed[1]) >= 13
    found = cases(output, "agree")
    assert found["64-true, device against CPU, 2 step(s)"] == found["32-true, device against CPU, 1 step(s)"] == 0
    assert found["float64, graph against sequential"] < 1e-10

    command = ["benchmarks/gpu.py", "--tiny", "--repeats", "1", "--resume", "--output", str(output)]
    rest = run_with(pretend_driver, "-m", "tests.pretend_cuda.script", *command)
    assert rest.returncode == 0, rest.stdout[-5000:]
    assert "largest difference" not in rest.stdout
    for part in PARTS - {"agree"}:
        assert cases(output, part)
        assert not any("NOT RECORDED" in case or "failed" in case for case in cases(output, part))
    rows = rows_of(output)
    assert {row["part"] for row in rows} == PARTS
    assert all(float(row["value"]) >= 0 for row in rows)
    rates = {row["case"] for row in rows if row["part"] == "engines" and row["unit"] == "client steps/s"}
    assert {"sequential, 32-true", "sequential graph, 32-true", "vectorised graph, bf16-mixed"} <= rates
    check_phases(rows)
    assert (output / "gpu.png").stat().st_size > 1000
    assert make("GPU_PARTS=tests agree") == f"The tables are in {output}/gpu.md.\n"


SLOW_IMPORT = """
import runpy, sys, time
from importlib.abc import MetaPathFinder

class Slow(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "command_line":
            time.sleep(1)

sys.meta_path.insert(0, Slow())
sys.modules.pop("command_line", None)
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A fork has imported everything; here the script imports a module of its own for a second."""


def test_the_budget_counts_from_the_start_of_the_process() -> None:
    options = ["--device", "cpu", "--tiny", "--budget-s", "1", "--output", "/nonexistent"]
    process = ForkedCommand(
        [sys.executable, "-c", SLOW_IMPORT, "benchmarks/gpu.py", *options],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    printed, _ = process.communicate()
    assert printed.count("no time") == 6
    assert process.returncode == 0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with whose stubs a device named cuda can be asked for."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stub")
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    return importlib.import_module("gpu")


@pytest.fixture
def gpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script without garbage collections after its measurements, which would search all objects of this process."""
    monkeypatch.setattr(script, "free", lambda device: None)
    return script


def test_a_machine_without_a_gpu_is_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="there is no CUDA device: give --device cpu --tiny"):
        gpu.main()


def setting_of(gpu: Any, output: Path, device: str = "cpu", deadline: float = math.inf, tiny: bool = True) -> Any:
    return gpu.Setting(device, tiny, deadline, output, 1)


def cases(output: Path, part: str) -> dict[str, float]:
    """Value of each case of a part, in the order they were noted."""
    return {row["case"]: float(row["value"]) for row in rows_of(output) if row["part"] == part}


class StubCase:
    """Takes a second; a compiled network raises."""

    memory: Any = None

    def __init__(self, *_: Any, steps: int) -> None:
        self.steps = steps
        self.algorithm = Mock()
        self.algorithm.network.compile.side_effect = RuntimeError("no C compiler")

    def seconds(self, engine: Any, setting: Any) -> float:
        return 1.0


def test_a_failure_is_noted_the_rest_is_measured_and_the_exit_code_is_one(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "Case", StubCase)
    monkeypatch.setattr(gpu, "flop_of_an_image", lambda setting: 1.0)
    monkeypatch.setitem(gpu.RUN, "round", Mock(side_effect=ValueError("no rounds")))
    monkeypatch.setitem(gpu.RUN, "pfl", lambda setting: setting.note("pfl", "last", 3.0, "s"))
    options = ["--device", "cpu", "--budget-s", "inf", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--part", "engines", "round", "pfl", *options])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert "engines: sequential compiled, 32-true; engines: sequential compiled, bf16" in str(end.value.code)
    measured = cases(tmp_path, "engines")
    failed = ["sequential compiled, 32-true: failed", "sequential compiled, bf16-mixed: failed"]
    assert list(measured)[-2:] == failed
    assert [name for name, value in measured.items() if math.isnan(value)] == failed
    assert "sequential channels-last, bf16-mixed" in measured
    assert list(cases(tmp_path, "round")) == ["whole part: failed"]
    assert cases(tmp_path, "pfl") == {"last": 3.0}
    printed = capsys.readouterr().err
    assert "RuntimeError: no C compiler" in printed
    assert "ValueError: no rounds" in printed


def test_what_failed_and_then_succeeds_has_not_failed(gpu: Any, tmp_path: Path) -> None:
    setting = setting_of(gpu, tmp_path)
    setting.attempt("pfl", "a", Mock(side_effect=ValueError))
    setting.attempt("pfl", "b", Mock(side_effect=ValueError))
    setting.attempt("pfl", "a", lambda: setting.note("pfl", "a: a round", 1.0, "s"))
    report = (tmp_path / "gpu.md").read_text()
    assert "a: failed" not in report
    assert "b: failed" in report


def test_a_failure_keeps_no_memory_and_an_interruption_stops(script: Any, tmp_path: Path) -> None:
    setting, known = setting_of(script, tmp_path), []

    def fail() -> None:
        network = torch.nn.Linear(1, 1)
        vars(network)["itself"] = network
        known.append(weakref.ref(network))
        raise RuntimeError

    setting.attempt("pfl", "fails", fail)
    assert known[0]() is None
    with pytest.raises(KeyboardInterrupt):
        setting.attempt("pfl", "stops", Mock(side_effect=KeyboardInterrupt))


def memory_of(works: bool, steps: int = 1) -> Any:
    return SimpleNamespace(
        stack=SimpleNamespace(recorder=SimpleNamespace(works=works), _steps=dict.fromkeys(range(steps)))
    )


REFUSED = SimpleNamespace(stack=None)


@pytest.mark.parametrize(
    ("memory", "asked", "device", "said"),
    [
        (memory_of(True), True, "cuda", ""),
        (memory_of(False), True, "cuda", ", NOT RECORDED"),
        (memory_of(True, steps=0), True, "cuda", ", NOT RECORDED"),
        (REFUSED, True, "cuda", ", NOT RECORDED"),
        (None, True, "cuda", ", NOT RECORDED"),
        (None, False, "cuda", ""),
        (memory_of(False), True, "cpu", ""),
    ],
)
def test_a_title_says_what_was_not_recorded(gpu: Any, memory: Any, asked: bool, device: str, said: str) -> None:
    assert gpu.unrecorded(memory, ("vectorised", 3, asked), device) == said


@pytest.mark.parametrize(("works", "said"), [(True, ""), (False, ", NOT RECORDED")])
def test_the_curve_shows_what_was_not_recorded(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, said: str
) -> None:
    axes = Mock()
    monkeypatch.setattr(gpu, "Case", StubCase)
    monkeypatch.setattr(StubCase, "memory", memory_of(works))
    monkeypatch.setattr(gpu.command_line, "new_figure", lambda *_: (Mock(), axes))
    gpu.run_part(setting_of(gpu, tmp_path, "cuda"), "curve")
    measured = cases(tmp_path, "curve")
    assert f"vectorised graph, 32-true{said}, 2 at once" in measured
    assert f"vectorised graph, 32-true{said}, 2 at once: peak memory" in measured
    assert "vectorised, 32-true, 2 at once" in measured
    drawn = {call.kwargs["label"]: call.args for call in axes.plot.call_args_list}
    assert drawn[f"vectorised graph, bf16-mixed{said} (a stub)"] == ((1, 2, 3), (2.0, 4.0, 6.0))
    assert len(drawn) == 4


class StubTrainer:
    """Makes rounds of a second without training."""

    memory: Any = None
    status = TrainerStatus.FINISHED
    made: list[StubTrainer]

    def __init__(self, *, callbacks: list[Any], **_: Any) -> None:
        self.callbacks = callbacks
        self.local_training = SimpleNamespace(_trainer=self.memory)
        self.state = SimpleNamespace(status=self.status)
        self.made.append(self)

    def fit(self, algorithm: Any, data: Any) -> None:
        self.callbacks[0].rounds.append(Counter({"clients": 1.0}))


@pytest.fixture
def trainers(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> type[StubTrainer]:
    monkeypatch.setattr(StubTrainer, "made", [], raising=False)
    monkeypatch.setattr(gpu, "FederatedTrainer", StubTrainer)
    return StubTrainer


@pytest.mark.parametrize(("works", "said"), [(True, ""), (False, ", NOT RECORDED")])
def test_whole_runs_begin_with_the_fastest_and_say_what_was_not_recorded(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: type[StubTrainer], works: bool, said: str
) -> None:
    monkeypatch.setattr(trainers, "memory", memory_of(works))
    setting = setting_of(gpu, tmp_path, "cuda", tiny=False)
    gpu.round_(setting)
    gpu.pfl(setting)
    wholes = [name.partition(":")[0] for name in cases(tmp_path, "round") if name.endswith("whole round")]
    titles = [f"vectorised graph, {{}}{said}", "vectorised, {}", "sequential, {}"]
    assert wholes == [title.format(precision) for title in titles for precision in ("bf16-mixed", "32-true")]
    rounds = [name for name in cases(tmp_path, "pfl") if name.endswith("a round")]
    assert rounds == [f"{title.format('32-true')}: a round" for title in titles]
    assert not setting.failed


def test_nothing_is_saved(gpu: Any, tmp_path: Path, trainers: type[StubTrainer]) -> None:
    gpu.pfl(setting_of(gpu, tmp_path))
    (checkpoint,) = (c for c in trainers.made[0].callbacks if isinstance(c, gpu.FederatedCheckpoint))
    checkpoint.on_round_end(trainer := Mock(round_index=10**6), None, {"val/accuracy": 1.0})
    checkpoint.on_train_end(trainer, None)
    trainer.save_checkpoint.assert_not_called()


def test_a_run_that_a_signal_stopped_is_no_measurement(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: type[StubTrainer]
) -> None:
    monkeypatch.setattr(trainers, "status", TrainerStatus.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        gpu.pfl(setting_of(gpu, tmp_path))
    assert len(trainers.made) == 1


def test_phases_leave_out_what_lies_between_rounds(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    phases = gpu.Phases("cpu", first=2, source="pooled")
    for index in (1, 2, 3):
        phases.on_round_start(trainer := SimpleNamespace(round_index=index), None)
        for seconds, mark in ((2, phases.on_aggregate), (3, phases.on_server_phase_end)):
            now[0] += seconds * index
            mark(trainer, None)
        now[0] += 100  # logging
        phases.on_round_end(trainer, None, {})
        now[0] += 1000  # saving
    phases.on_evaluation_end(trainer, None, {})  # the run's test
    assert phases.rounds == [{"clients": 4, "server": 6}, {"clients": 6, "server": 9}]


@pytest.mark.parametrize(
    ("left", "before", "begins"),
    [(10, 0, True), (10, 9, True), (10, 10, True), (10, 11, False), (0, 0, False), (-1, 0, False)],
)
def test_a_measurement_begins_with_as_much_time_as_the_last_one_took(
    gpu: Any, left: float, before: float, begins: bool
) -> None:
    assert gpu.may_begin(left, before) is begins


def test_a_part_stops_before_the_deadline_another_continues(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, made = [0.0], []

    def measure(part: str, case: str, seconds: float) -> None:
        def pass_time() -> None:
            made.append(case)
            now[0] += seconds

        setting.attempt(part, case, pass_time)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    setting = setting_of(gpu, tmp_path, deadline=100.0)
    measure("engines", "first", 10)
    measure("engines", "slow", 60)
    measure("engines", "too late", 1)
    measure("pfl", "of another part", 1)
    assert made == ["first", "slow", "of another part"]
    assert "engines: too late: no time left" in capsys.readouterr().out
