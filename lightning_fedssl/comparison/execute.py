"""Bringing runs to their end: one process each, several at a time, going on where an earlier attempt stopped.

A run is ``fit`` with its resolved configuration and seed, so that it can be repeated by hand. It is finished when its
metrics hold every round and the test. A run that is not goes on from its last checkpoint, or begins again if there is
none. A lock that the run's process holds keeps a second ``compare`` from training the same run at the same time, also
where the first one was killed and left its processes behind.
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
"""How often processes are looked at."""


@dataclass
class Attempt:
    """A run's process.

    Attributes:
        run: The run.
        process: Its process.
        lock: The lock's file descriptor in this process.
        began: When it was started, in seconds of the monotonic clock.
    """

    run: Run
    process: subprocess.Popen[bytes]
    lock: int
    began: float


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: The run.
        result: What it came to; None if it failed.
        how: ``trained``, ``resumed``, ``cached``, ``failed`` or ``stopped``.
        seconds: Wall time of this attempt; 0 if there was none.
    """

    run: Run
    result: Result | None
    how: str
    seconds: float = 0.0

    @property
    def log(self) -> Path:
        """What the run's process printed."""
        return self.run.folder / "log.txt"


class Executor:
    """Trains what is not yet trained.

    Args:
        command: The program and arguments before ``fit``'s own.
        jobs: Processes at a time.
        report: Told of every outcome as it comes.
        watch: Called now and then with the runs that are training.
    """

    def __init__(
        self,
        command: Sequence[str],
        jobs: int,
        report: Callable[[Outcome], None],
        watch: Callable[[list[Run]], None] = lambda runs: None,
    ) -> None:
        self.command = list(command)
        self.jobs = jobs
        self.report = report
        self.watch = watch
        self.outcomes: list[Outcome] = []

    def execute(self, runs: Sequence[Run]) -> list[Outcome]:
        """Bring every run to its end; the outcomes in the order in which they came.

        An interruption is passed on to the processes, which finish their round and save; what had ended until then is
        in :attr:`outcomes`.

        Raises:
            KeyboardInterrupt: After the processes have ended.
        """
        waiting, training = self._cached(runs), list[Attempt]()
        try:
            while waiting or training:
                while waiting and len(training) < self.jobs and (attempt := self._start_next(waiting)):
                    training.append(attempt)
                self.watch([attempt.run for attempt in training])
                time.sleep(POLL_SECONDS)
                training = list(self._still_training(training))
        except KeyboardInterrupt:
            _stop(training)
            for attempt in training:
                self._end(attempt, interrupted=True)
            raise
        return self.outcomes

    def _cached(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that are left to train; the others are reported."""
        left = []
        for run in runs:
            if result := result_of(run):
                self._add(Outcome(run, result, "cached"))
            else:
                left.append(run)
        return left

    def _start_next(self, waiting: list[Run]) -> Attempt | None:
        """Start the first run that no other process trains; one that has meanwhile been finished is reported."""
        for run in list(waiting):
            if (lock := _lock(run.folder)) is not None:
                waiting.remove(run)
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

    def _still_training(self, training: list[Attempt]) -> Iterator[Attempt]:
        for attempt in training:
            if attempt.process.poll() is None:
                yield attempt
            else:
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
    """Whether a run can go on, with no round of it missing in its metrics."""
    saved = any(version.joinpath("checkpoints", "last.ckpt").is_file() for version in records.versions(folder))
    return saved and not records.unfinished(records.rounds(folder), whole=False)


def _write_config(run: Run) -> Path:
    path = run.folder / "config.yaml"
    path.write_text(run.resolved.text, encoding="utf-8")
    return path


def _environment() -> dict[str, str]:
    """One thread a process, nothing of the caller's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_FIT__")}
    kept.pop("PL_GLOBAL_SEED", None)
    return {**kept, "OMP_NUM_THREADS": "1"}


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it and the copies that processes were given are closed."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _stop(training: Sequence[Attempt]) -> None:
    """Ask the processes to finish their round and to save, and wait; a second interruption ends them at once."""
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
    """While it is entered, SIGTERM interrupts like Ctrl-C."""
    import signal

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
