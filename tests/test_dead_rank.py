"""A rank that dies in a run of real processes: the others end soon, with one line that names it; the run resumes.

One run starts fresh interpreters, as a user's does; the processes of the others are forked.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric import Fabric

from lightning_fedssl.distributed import rank_watch
from lightning_fedssl.storage import checkpoint_file
from tests.cli.helpers import CONFIG
from tests.forked_command import ForkedCommand, own_environment

SECONDS = 300
"""Until a run of a few rounds must have ended on a busy machine; a rank that waits for ever exceeds it."""

FAILS = """
import os, signal, time
from lightning_fedssl import FederatedCallback
from lightning_fedssl.distributed import rank_watch

class Fails(FederatedCallback):
    '''In round 3 one rank is killed or raises an error while a client trains; another may sleep or train meanwhile.'''

    def __init__(self, rank: int, how: str = "kill") -> None:
        self.rank, self.how = rank, how
        rank_watch.GRACE_SECONDS = 1.0 if how in ("sleep", "busy") else 10.0

    def on_client_start(self, trainer, algorithm, data, work):
        if trainer.round_index != 3:
            return
        if trainer.global_rank == self.rank:
            if self.how in ("raise", "busy"):
                raise OSError(28, "No space left on device", "cache.bin")
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how in ("sleep", "busy"):
            time.sleep(1000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a run on two ranks, and the callback."""
    path = tmp_path_factory.mktemp("ranks")
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "max_rounds": 5, "devices": 2}}
    (path / "run.yaml").write_text(yaml.safe_dump(config))
    (path / "fails.py").write_text(FAILS)
    return path


def start(
    folder: Path, root: str, *options: str, program: type[subprocess.Popen[str]] = ForkedCommand
) -> subprocess.Popen[str]:
    checkout = str(Path(__file__).parent.parent)
    return program(
        [sys.executable, "-m", "lightning_fedssl", "fit", "--config", "run.yaml", "--trainer.default_root_dir", root,
         *options],
        cwd=folder, env={**own_environment(), "PYTHONPATH": checkout}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def fails(
    folder: Path, root: str, rank: int, how: str, program: type[subprocess.Popen[str]] = ForkedCommand
) -> tuple[int, list[str]]:
    """Exit code of the first process, and the lines of errors of all: the pipe closes when the last rank has ended."""
    callback = [f"--trainer.callbacks={{class_path: fails.Fails, init_args: {{rank: {rank}, how: {how}}}}}"]
    process = start(folder, root, *callback, program=program)
    log = process.communicate(timeout=SECONDS)[1]
    assert "Traceback" not in log, log
    return process.returncode, [line for line in log.splitlines() if line.startswith("error: ")]


def last(folder: Path, root: str) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint of a run."""
    path = checkpoint_file.find("last", folder / root)
    return checkpoint_file.load(path)["state_dict"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the run without a fault."""
    process = start(folder, "whole")
    assert process.wait(SECONDS) == 0
    return last(folder, "whole")


def test_the_other_rank_ends_with_one_line_and_the_run_resumes_bitwise(
    folder: Path, whole: dict[str, torch.Tensor]
) -> None:
    code, errors = fails(folder, "killed", 1, "kill", program=subprocess.Popen)
    assert code == 1
    (line,) = errors
    assert line.startswith("error: rank 1 died: killed, out of memory, or failed")
    assert "resume with --ckpt_path last" in line
    assert checkpoint_file.load(checkpoint_file.find("last", folder / "killed"))["round"] == 2
    assert start(folder, "killed", "--ckpt_path", "last").wait(SECONDS) == 0
    for name, t in last(folder, "killed").items():
        assert torch.equal(t, whole[name]), name


def test_a_rank_that_comes_to_no_collective_ends_too(folder: Path) -> None:
    """It sleeps, so no collective tells it that rank 0 is gone; it also is the only one that can say so."""
    code, errors = fails(folder, "sleeps", 0, "sleep")
    assert code == -signal.SIGKILL
    (line,) = errors
    assert "rank 0 died: killed" in line


def test_the_error_of_a_rank_other_than_the_first_is_printed_alone(folder: Path) -> None:
    code, errors = fails(folder, "raises", 1, "raise")
    assert code == 1
    (line,) = errors
    assert line.startswith("error: rank 1: cache.bin: No space left on device; free some space")


def test_the_error_of_a_forked_rank_is_printed_although_rank_0_does_not_return_to_read_it(folder: Path) -> None:
    """Rank 0 trains a client for longer than it is given, and is ended."""
    options = ["--trainer.callbacks={class_path: fails.Fails, init_args: {rank: 1, how: busy}}"]
    process = start(folder, "busy", *options, "--trainer.strategy", "forked")
    log = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 1
    assert "No space left on device: 'cache.bin'" in log
    assert log.count("error: rank 1 died") == 1


def test_a_rank_counts_as_one_failure_whichever_of_its_threads_sees_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread would count as the rank that reports, the main thread as a later one, and nobody would report."""
    failed = itertools.count(1)
    monkeypatch.setattr(rank_watch, "_count_failure", lambda: next(failed))
    first, second = (rank_watch.RankWatch(Fabric(accelerator="cpu")) for _ in range(2))
    assert [first._reports(), first._reports()] == [True, True]
    assert [second._reports(), second._reports()] == [False, False]


def test_a_process_that_has_ended_is_not_alive() -> None:
    """Also while its parent has not asked for the exit code."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert rank_watch.is_alive(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    deadline = time.monotonic() + SECONDS
    while rank_watch.is_alive(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not rank_watch.is_alive(child.pid)
    child.wait()
    assert not rank_watch.is_alive(child.pid)
