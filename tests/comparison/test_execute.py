"""Execution, with a stand-in for fit."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.comparison import execute, progress
from lightning_fedssl.comparison.command import line_of
from lightning_fedssl.comparison.execute import Outcome, terminable, train
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.results import rounds
from lightning_fedssl.storage.files import lock_folder
from tests.comparison.helpers import FAKE, run_of

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.02)


def trained(runs: list[Run], jobs: int = 1) -> dict[str, Outcome]:
    """How every run ended, by its name."""
    outcomes: list[Outcome] = []
    train(runs, FAKE, jobs, outcomes.append)
    return {outcome.run.name: outcome for outcome in outcomes}


def attempts(run: Run) -> list[str]:
    return (run.folder / "log.txt").read_text().splitlines()


def test_runs_are_trained_once_with_their_seed_and_configuration() -> None:
    runs = [run_of("A"), run_of("A", seed=4), run_of("B", rounds=1)]
    assert {name: outcome.how for name, outcome in trained(runs, jobs=2).items()} == {
        "A, seed 0": "trained", "A, seed 4": "trained", "B, seed 0": "trained"
    }  # fmt: skip
    assert attempts(runs[1]) == ["seed 4 from round 1"]
    again = trained(runs)
    assert [len(outcome.rows) for outcome in again.values()] == [3, 3, 1]
    assert {outcome.how for outcome in again.values()} == {"cached"}
    assert attempts(runs[0]) == ["seed 0 from round 1"]


def forked_fit() -> int:
    """The stand-in for fit with the arguments of its process."""
    assert "RANK" not in os.environ
    runpy.run_path(FAKE[1])
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_runs_are_forked_where_a_function_trains_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own arguments, log and exit code, and in this folder; a function has no program to start."""
    monkeypatch.setattr(execute, "_PRELOADED", [])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runs, outcomes = [run_of("A", seed=4), run_of("B", fails=True)], list[Outcome]()
    train(runs, forked_fit, 2, outcomes.append)
    assert {outcome.run.name: outcome.how for outcome in outcomes} == {"A, seed 4": "trained", "B, seed 0": "failed"}
    assert attempts(runs[0]) == ["seed 4 from round 1"]


IMPORTING = """
import signal
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
from lightning_fedssl.comparison import execute
Path("slow.py").write_text("open('begun', 'w'); import time; time.sleep(9)")
execute._PRELOADED[:] = ["slow"]
execute.Forked(int, [], Path("log.txt"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_ctrl_c_while_the_package_is_imported_prints_one_traceback() -> None:
    """That of the process which compares, and which catches it."""
    with Path("err.txt").open("w") as err:
        process = subprocess.Popen([sys.executable, "-c", IMPORTING], stderr=err, start_new_session=True)
    while not Path("begun").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    assert Path("err.txt").read_text().count("Traceback") == 1
    os.killpg(process.pid, signal.SIGKILL)


def test_a_comparison_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    runs = [run_of("A", rounds=2), run_of("B", rounds=6, sleep=0.2)]
    trained(runs[:1])
    train(runs, FAKE, 1, lambda outcome: None, watch=progress.SuiteProgress(runs).show)
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"  all runs: round [3-8] of 8, about 00:\d\d left", line) for line in lines)


def test_a_failing_run_does_not_stop_the_others_and_is_tried_again() -> None:
    runs = [run_of("A", fails=True), run_of("B")]
    outcomes = trained(runs)
    assert (outcomes["A, seed 0"].how, outcomes["B, seed 0"].how) == ("failed", "trained")
    assert "FAILED, see runs/a/seed_0_x/log.txt" in line_of(outcomes["A, seed 0"])
    assert trained([run_of("A")])["A, seed 0"].how == "trained"


def test_a_run_that_another_process_trains_is_waited_for() -> None:
    taken, free = run_of("A"), run_of("B")
    lock = lock_folder(taken.folder)
    assert lock is not None
    ended: list[Run] = []

    def release(outcome: Outcome) -> None:
        ended.append(outcome.run)
        if outcome.run is free:
            lock.release()

    train([taken, free], FAKE, 2, release)
    assert ended == [free, taken]


def test_at_most_so_many_processes_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: object, **settings: object) -> subprocess.Popen[bytes]:
        running.append(sum(process.poll() is None for process in processes) + 1)
        processes.append(real(*arguments, **settings))  # type: ignore[call-overload]
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    trained([run_of(label, rounds=2, sleep=0.1) for label in "ABCD"], jobs=2)
    assert max(running) == 2


def parent(results: Any) -> None:
    """``compare``'s part that starts processes; it sends how each run has ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    try:
        with terminable():
            train([run_of("A", rounds=12, sleep=0.25)], FAKE, 1, lambda outcome: results.send(outcome.how))
    except KeyboardInterrupt:
        sys.exit(130)


def start_parent() -> tuple[Any, Any]:
    """A process of its own that has trained a few rounds, and the end of its pipe."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=parent, args=(sender,))
    process.start()
    sender.close()
    deadline = time.monotonic() + 120
    while len(rounds(run_of("A").folder)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, receiver


def test_a_killed_run_resumes_from_its_last_checkpoint() -> None:
    process, _ = start_parent()
    child = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    process.kill()
    process.join()
    os.kill(int(child.stdout), signal.SIGKILL)
    done = len(rounds(run_of("A").folder))
    (outcome,) = trained([run_of("A", rounds=12)]).values()
    assert outcome.how == "resumed"
    assert [row["step"] for row in outcome.rows] == list(range(1, 13))
    first, second = attempts(run_of("A"))
    assert first == "seed 0 from round 1"
    assert 1 < done <= int(second.rpartition(" ")[2]) <= done + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_lets_the_current_round_finish_and_the_same_command_resumes(number: signal.Signals) -> None:
    process, receiver = start_parent()
    os.kill(process.pid, number)
    process.join()
    assert (process.exitcode, receiver.recv()) == (130, "stopped")
    assert 2 <= len(rounds(run_of("A").folder)) < 12
    assert trained([run_of("A", rounds=12)])["A, seed 0"].how == "resumed"


def test_a_run_that_lost_rounds_of_its_metrics_begins_again() -> None:
    run = run_of("A")
    trained([run])
    file = run.folder / "lightning_logs" / "version_0" / "metrics.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], *lines[2:], ""]))
    assert trained([run])["A, seed 0"].how == "trained"
    assert attempts(run) == ["seed 0 from round 1"] * 2
