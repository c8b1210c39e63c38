"""Trains runs: one process each, several at the same time, resuming runs that an earlier attempt
has not finished.

On Linux the processes are forked from one that has imported the package, which takes longer than a
short run.

A run is ``fit`` with its resolved configuration and seed, so that a user can repeat it by hand. A
run is finished when its metrics contain every round and the test. An unfinished run resumes from
its last checkpoint, or starts again if it has none. A run's folder is locked while it trains, so
that two comparisons do not train the same run at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from filelock import FileLock

from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.results import Row, are_whole, is_finished, rounds
from lightning_fedssl.storage.files import lock_folder, versions

POLL_SECONDS = 0.2
"""Seconds between two checks of the processes."""


_NOT_FOR_A_RUN = re.compile(
    "(FEDSSL_FIT__|SLURM_|TORCHELASTIC_|JSM_).*|PL_GLOBAL_SEED|MASTER_(ADDR|PORT)"
    "|(|GLOBAL_|LOCAL_|GROUP_|ROLE_|NODE_)RANK|(|LOCAL_|GROUP_|ROLE_)WORLD_SIZE"
)
"""Environment variables that a run does not get: it would take the processes that SLURM or torchrun
has started for its own ranks."""


class Forked:
    """A process that runs ``fit``, forked from one that has imported the package.

    Args:
        main: Runs the command line of the process, and returns the exit code.
        arguments: Those of the command line, from ``fit`` on.
        log: The file to which it prints.
    """

    def __init__(self, main: Callable[[], int], arguments: Sequence[str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        # Ctrl-C in a terminal goes to the process that imports, too, which would print where it is.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
        self.process = context.Process(target=_fit, args=(main, arguments, os.getcwd(), log))
        self.process.start()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def wait(self) -> None:
        """Wait for its end."""
        self.process.join()


Command = Sequence[str] | Callable[[], int]
"""A program with the arguments before ``fit``; or a function that runs the command line of its
process, in processes that are forked."""

_LOGGERS = """\
[{class_path: CSVLogger, init_args: {save_dir: %r, flush_logs_every_n_steps: 1}},
{class_path: TensorBoardLogger,
init_args: {save_dir: %r, name: '', version: '', default_hp_metric: false}}]
"""
"""The usual ones, but TensorBoard's files are where it is told: it shows a run under its path."""

_PRELOADED = ["lightning_fedssl.cli.lightning_cli", "lightning_fedssl.algorithms", "torchvision"]


def _fit(main: Callable[[], int], arguments: Sequence[str], folder: str, log: Path) -> None:
    os.chdir(folder)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv[1:] = arguments
    sys.exit(main())


@dataclass
class Attempt:
    """A process that trains a run.

    Attributes:
        run: The run.
        process: The process.
        lock: The lock of the run's folder.
        began: The start time, in seconds of the monotonic clock.
    """

    run: Run
    process: subprocess.Popen[bytes] | Forked
    lock: FileLock
    began: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        run: The run.
        rows: The scalars of its rounds; empty if it failed or was stopped.
        how: ``trained``, ``resumed``, ``cached``, ``failed`` or ``stopped``.
        seconds: Wall-clock time of this attempt; 0 for a cached result.
    """

    run: Run
    rows: list[Row]
    how: str
    seconds: float = 0.0


def train(
    runs: Sequence[Run],
    command: Command,
    jobs: int,
    ended: Callable[[Outcome], None],
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Train the runs that have no result yet.

    On an interruption, or an error such as a full disk, the processes get SIGTERM, finish their
    round and save a checkpoint.

    Args:
        runs: The runs.
        command: What runs ``fit``.
        jobs: The number of processes at the same time.
        ended: Called with every outcome when its run ends.
        watch: Called again and again while runs are training.

    Raises:
        KeyboardInterrupt: After the processes have ended.
        OSError: Likewise, if a file of a run cannot be written.
    """
    for name in filter(_NOT_FOR_A_RUN.fullmatch, list(os.environ)):
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"  # runs take one core each
    waiting = list(runs)
    training = list[Attempt]()
    try:
        while waiting or training:
            for run in list(waiting):
                rows = rounds(run.folder)
                if is_finished(rows):
                    waiting.remove(run)
                    ended(Outcome(run, rows, "cached"))
                elif len(training) < jobs and (lock := lock_folder(run.folder)):
                    waiting.remove(run)
                    training.append(_start(run, command, lock))
            time.sleep(POLL_SECONDS)
            watch()
            for attempt in [a for a in training if a.process.poll() is not None]:
                training.remove(attempt)
                ended(_outcome(attempt))
    except BaseException:
        for attempt in training:
            attempt.process.terminate()
        for attempt in training:
            attempt.process.wait()
            ended(_outcome(attempt, interrupted=True))
        raise


def _start(run: Run, command: Command, lock: FileLock) -> Attempt:
    config = run.folder / "config.yaml"
    config.write_text(run.resolved.text, encoding="utf-8")
    options = ["fit", "--config", str(config), "--seed_everything", str(run.seed)]
    options += ["--trainer.default_root_dir", str(run.folder)]
    board = run.folder.parents[2] / "tensorboard" / run.folder.parent.name / f"seed_{run.seed}"
    options += ["--trainer.logger", _LOGGERS % (run.folder.as_posix(), board.as_posix())]
    if has_checkpoint(run.folder):
        options += ["--ckpt_path", "last"]
    else:
        shutil.rmtree(run.folder / "lightning_logs", ignore_errors=True)
        shutil.rmtree(board, ignore_errors=True)
    if callable(command):
        process = Forked(command, options, run.folder / "log.txt")
        return Attempt(run, process, lock, time.monotonic())
    with (run.folder / "log.txt").open("ab") as log:
        started = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    return Attempt(run, started, lock, time.monotonic())


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can resume: it has a checkpoint, and its metrics contain every round so far."""
    saved = [*folder.glob("lightning_logs/version_*/checkpoints/last.ckpt")]
    return bool(saved) and are_whole(rounds(folder))


def _outcome(attempt: Attempt, interrupted: bool = False) -> Outcome:
    attempt.lock.release()
    rows = rounds(attempt.run.folder)
    if is_finished(rows):
        how = "resumed" if len(versions(attempt.run.folder)) > 1 else "trained"
    else:
        rows = []
        how = "stopped" if interrupted else "failed"
    return Outcome(attempt.run, rows, how, time.monotonic() - attempt.began)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside this context, SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
