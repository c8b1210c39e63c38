"""Trains runs: one process each, several at the same time, resuming runs that an earlier attempt has not finished.

A run is ``fit`` with its resolved configuration and seed, so that a user can repeat it by hand. A run is finished when
its metrics contain every round and the test. An unfinished run resumes from its last checkpoint, or starts again if it
has none. The process of a run holds a lock, so that a second ``compare`` does not train the same run at the same time,
even if the first ``compare`` was killed and its processes are still running.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedssl.comparison import records
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.results import Result, result_of

POLL_SECONDS = 0.2
"""Seconds between two checks of the processes."""


@dataclass
class Attempt:
    """A process that trains a run.

    Attributes:
        run: The run.
        process: The process.
        lock: The file descriptor of the run's lock in this process.
        began: The start time, in seconds of the monotonic clock.
    """

    run: Run
    process: subprocess.Popen[bytes]
    lock: int
    began: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        run: The run.
        result: Its result; None if it failed or was stopped.
        how: ``trained``, ``resumed``, ``cached``, ``recorded`` (known from another folder), ``failed`` or ``stopped``.
        seconds: Wall-clock time of this attempt; 0 for a cached or recorded result.
    """

    run: Run
    result: Result | None
    how: str
    seconds: float = 0.0

    @property
    def log(self) -> Path:
        """The file with the output of the run's process."""
        return self.run.folder / "log.txt"


class Executor:
    """Trains the runs that have no result yet.

    Args:
        command: The program that runs ``fit``, with the arguments before ``fit``.
        jobs: The number of processes at the same time.
        report: Called with every outcome when its run ends.
        watch: Called repeatedly with the runs that are training.
        current: Called with a run before it starts; returns the run to train, which may have another folder.
    """

    def __init__(
        self,
        command: Sequence[str],
        jobs: int,
        report: Callable[[Outcome], None],
        watch: Callable[[list[Run]], None] = lambda runs: None,
        current: Callable[[Run], Run] = lambda run: run,
    ) -> None:
        self.command = list(command)
        self.jobs = jobs
        self.report = report
        self.watch = watch
        self.current = current
        self.outcomes: list[Outcome] = []

    def execute(self, runs: Sequence[Run]) -> list[Outcome]:
        """Train every run; return the outcomes in the order in which the runs ended.

        On an interruption, or an error such as a full disk, the processes get SIGTERM, finish their round and save a
        checkpoint. :attr:`outcomes` then has every run that was cached or started.

        Raises:
            KeyboardInterrupt: After the processes have ended.
            OSError: Likewise, if a file of a run cannot be written.
        """
        waiting, training = self._cached(runs), list[Attempt]()
        try:
            while waiting or training:
                while waiting and len(training) < self.jobs and (attempt := self._start_next(waiting)):
                    training.append(attempt)
                self.watch([attempt.run for attempt in training])
                time.sleep(POLL_SECONDS)
                self._end_finished(training)
        except BaseException:
            _stop(training)
            for attempt in training:
                self._end(attempt, interrupted=True)
            raise
        return self.outcomes

    def _cached(self, runs: Sequence[Run]) -> list[Run]:
        """Report the runs that have a result; return the others."""
        left = []
        for run in runs:
            if result := result_of(run):
                self._add(Outcome(run, result, "cached"))
            else:
                left.append(run)
        return left

    def _start_next(self, waiting: list[Run]) -> Attempt | None:
        """Start the first run that no other process trains; report runs that have been finished in the meantime."""
        for planned in list(waiting):
            if _is_locked(planned.folder):  # asked first: looking for changed code takes milliseconds
                continue
            run = self.current(planned)
            if (lock := _lock(run.folder)) is not None:
                waiting.remove(planned)
                if result := result_of(run):
                    os.close(lock)
                    self._add(Outcome(run, result, "cached"))
                else:
                    return self._start(run, lock)
        return None

    def _start(self, run: Run, lock: int) -> Attempt:
        options = ["fit", "--config", str(_write_config(run)), "--seed_everything", str(run.seed)]
        options += ["--trainer.default_root_dir", str(run.folder)]
        if has_checkpoint(run.folder):
            options += ["--ckpt_path", "last"]
        else:
            shutil.rmtree(run.folder / "lightning_logs", ignore_errors=True)
        with (run.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [*self.command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=_environment(), pass_fds=[lock],
            )  # fmt: skip
        return Attempt(run, process, lock, time.monotonic())

    def _end_finished(self, training: list[Attempt]) -> None:
        """Take the attempts whose processes have ended out of the list."""
        for attempt in list(training):
            if attempt.process.poll() is not None:
                training.remove(attempt)
                self._end(attempt)

    def _end(self, attempt: Attempt, interrupted: bool = False) -> None:
        os.close(attempt.lock)
        seconds = time.monotonic() - attempt.began
        result = result_of(attempt.run)
        resumed = len(records.versions(attempt.run.folder)) > 1
        how = ("resumed" if resumed else "trained") if result else "stopped" if interrupted else "failed"
        self._add(Outcome(attempt.run, result, how, seconds))

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.report(outcome)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can resume: it has a checkpoint, and its metrics contain every round so far."""
    saved = any(version.joinpath("checkpoints", "last.ckpt").is_file() for version in records.versions(folder))
    return saved and not records.unfinished(records.rounds(folder), whole=False)


def _write_config(run: Run) -> Path:
    path = run.folder / "config.yaml"
    path.write_text(run.resolved.text, encoding="utf-8")
    return path


def _environment() -> dict[str, str]:
    """The environment of a run: one thread per process, and no option or seed from the caller's environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_FIT__")}
    kept.pop("PL_GLOBAL_SEED", None)
    return {**kept, "OMP_NUM_THREADS": "1"}


def _lock(folder: Path) -> int | None:
    """A file descriptor that holds the folder's lock until it and the copies in child processes are closed.

    None if another process holds the lock. (A lock of the package filelock ends with this process. This one lasts as
    long as a run that outlives it.)
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_locked(folder: Path) -> bool:
    if (lock := _lock(folder)) is None:
        return True
    os.close(lock)
    return False


def _stop(training: Sequence[Attempt]) -> None:
    """Send SIGTERM to the processes, which then finish their round and save; wait. A second interruption kills them."""
    try:
        for attempt in training:
            attempt.process.terminate()
        for attempt in training:
            attempt.process.wait()
    except KeyboardInterrupt:
        for attempt in training:
            attempt.process.kill()
            attempt.process.wait()


@contextmanager
def terminable() -> Iterator[None]:
    """Inside this context, SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    import signal

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
