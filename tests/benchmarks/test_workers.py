"""The workers of benchmarks/run.py take turns, and one that gives no result says why."""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"

WORKER = """
    import sys, time
    sys.path.insert(0, {peers!r})
    from pacer import Pacer
    loss = 1.0
    {before}
    pacer = Pacer(lambda: loss)
    print("a library talks")
    while True:
        pacer.pause()
        {round}
"""

ROUNDS = {
    "learns": "loss /= 2; open({log!r}, 'a').write('a'); sum(range(300_000))",
    "too": "loss /= 2; open({log!r}, 'a').write('b')",
    "idle": "time.sleep(0.01)",
    "breaks": "raise ValueError('no such client')",
    "parent": "open({log!r}, 'a').write(Path(f'/proc/{{child.pid}}/stat').read_text().rpartition(')')[2])",
}

CHILD = """
import subprocess
from pathlib import Path
child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
"""
"""A process that is always busy."""


def fields_of(process: int) -> list[str]:
    """Of a process: its state (R while it runs, T while it is stopped), its parent, and so on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, or will be within a minute: a signal reaches it when it gets a core."""
    deadline = time.monotonic() + 60
    while fields_of(process)[0] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    return fields_of(process)[0] == "T"


def child_of(parent: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if fields_of(int(folder.name))[1] == str(parent):
                return int(folder.name)
    raise AssertionError(f"process {parent} has no child")


@pytest.fixture
def workers(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with small scripts in the place of the simulators'; ``tmp_path / "log"`` names who ran a round."""
    monkeypatch.setattr(script, "PEERS", tmp_path)
    for name, code in ROUNDS.items():
        before, log = f"exec({CHILD!r})" if name == "parent" else "", str(tmp_path / "log")
        worker = textwrap.dedent(WORKER).format(peers=str(PEERS), round=code.format(log=log), before=before)
        (tmp_path / f"{name}.py").write_text(worker)
    return script


def test_turns_alternate_and_are_counted_per_round(workers: Any, tmp_path: Path) -> None:
    contenders = [workers.Contender("learns", "learns.py"), workers.Contender("too", "too.py", scale=2)]
    results = workers.interleave(contenders, 4, 2)
    assert (tmp_path / "log").read_text() == "ab" + 2 * ("aaaa" + "bb")
    assert [results[name].rounds for name in ("learns", "too")] == [9, 5]
    assert results["learns"].loss == 0.5**9
    assert all(len(r.cpu) == len(r.wall) == 2 and not r.failure for r in results.values())
    assert min(results["learns"].cpu) > 10 * min(results["too"].cpu)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are found in /proc")
def test_children_of_a_worker_are_stopped_while_others_have_the_turn(
    workers: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with workers.Worker(workers.Contender("parent", "parent.py"), str(tmp_path)) as worker:
        worker.read()
        child = child_of(worker.process.pid)
        request.addfinalizer(partial(os.kill, child, signal.SIGKILL))
        assert is_stopped(child)
        worker.ask("rounds 1")
        assert (tmp_path / "log").read_text().split()[0] == "R"
        assert is_stopped(child)
    assert fields_of(child)[0] == "R"


def test_what_gives_no_result_says_why(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = workers.Contender("absent", "learns.py", module="no_such_simulator")
    elsewhere = workers.Contender("elsewhere", "learns.py", python="/no/such/python")
    broken = [workers.Contender(name, f"{name}.py") for name in ("idle", "breaks", "learns")]
    results = workers.interleave([absent, elsewhere, *broken], 1, 1)
    assert results["absent"].failure == f"no_such_simulator is not installed for {sys.executable}"
    assert results["elsewhere"].failure == "torch is not installed for /no/such/python"
    assert results["idle"].failure == "did not learn: its loss went from 1.000 to 1.000"
    assert results["breaks"].failure == "failed: it ended with exit code 1: ValueError: no such client"
    assert not results["learns"].failure
    assert workers.report_failures(results)[1] == f"* absent: {results['absent'].failure}"
    monkeypatch.setattr(workers, "PATIENCE", 0.0)
    assert "printed nothing" in workers.interleave(broken[2:], 1, 1)["learns"].failure


def test_ratios_are_taken_turn_by_turn(workers: Any) -> None:
    """2 / 1 and 9 / 3; the median of 2, 2.5, 3 and their range."""
    assert workers.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert workers.spread([2.0, 3.0, 2.5]) == "2.50 (2.00-3.00)"
    assert math.isnan(workers.Result().loss)


def test_our_worker_has_the_workload_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    ours, workload = importlib.import_module("ours"), importlib.import_module("workload")
    data = ours.Data()
    data.setup("fit")
    pixels, labels = workload.images()
    for client in (0, 1, 51, 999):
        own, rows = data.local_data(client, 1), workload.client(client)
        assert own.labeled.tolist() == list(range(rows.start, rows.stop))
        assert own.labels.tolist() == labels[rows].tolist()
        x = own.weak(own.labeled, "labeled")
        assert (255 * x).round().byte().numpy().tobytes() == pixels[rows].tobytes()
