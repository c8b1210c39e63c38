"""Worker processes of benchmarks/run.py, which run in turns, and their measurements."""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from command_line import ROOT

PEERS = ROOT / "benchmarks" / "peers"
MARK = "@report "
PATIENCE = 300
"""The longest time, in seconds, for the start of a worker or for the rounds of a turn."""


@dataclass(frozen=True)
class Contender:
    """One row of a table.

    Attributes:
        name: Its name in the table.
        script: A worker in ``benchmarks/peers``.
        arguments: Its command line.
        python: The interpreter of its environment.
        module: The module that must be installed in that environment.
        scale: A slow contender runs 1 / scale of the others' rounds in a turn.
        must_learn: Whether its result is rejected if its loss does not fall.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable
    module: str = "torch"
    scale: int = 1
    must_learn: bool = True


@dataclass
class Result:
    """The measurements of one contender.

    Attributes:
        cpu: CPU seconds of a round over the process tree, one value per turn.
        wall: Wall seconds of a round, one value per turn.
        loss: Loss of the global model after all rounds, NaN if it was not requested.
        first_loss: Loss before the first round.
        rounds: Number of rounds.
        failure: The reason if there is no result.
    """

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    loss: float = float("nan")
    first_loss: float = float("inf")
    rounds: int = 0
    failure: str = ""


class WorkerEndedError(Exception):
    """A worker ended too early; the message is the end of its standard error output."""


class Worker:
    """A contender's process; it waits until it gets a command to run rounds.

    Args:
        contender: The contender to start.
        folder: For its temporary files, which a contender that is ended does not remove.
    """

    def __init__(self, contender: Contender, folder: str) -> None:
        self.errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)
        settings = {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
            "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu",
            "RAY_worker_niceness": "0", "TMPDIR": folder,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [contender.python, str(PEERS / contender.script), *contender.arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **settings},
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(BrokenPipeError):  # the process has already ended
            if self.process.stdin is not None:
                self.process.stdin.close()  # which ends the process
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.errors.close()

    def read(self) -> dict[str, float]:
        """The next report.

        Raises:
            WorkerEndedError: If there is none, or none within :data:`PATIENCE`.
        """
        while (line := self._next_line()) is not None:
            if line.startswith(MARK):
                report: dict[str, float] = json.loads(line.removeprefix(MARK))
                return report
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        words = lines[-1] if lines else "without a word"
        raise WorkerEndedError(f"it ended with exit code {self.process.wait()}: {words}")

    def _next_line(self) -> str | None:
        try:
            return self.lines.get(timeout=PATIENCE)
        except queue.Empty:
            self.process.kill()
            raise WorkerEndedError(f"it printed nothing for {PATIENCE} seconds") from None

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, command: str) -> dict[str, float]:
        """A command's report."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()


def interleave(contenders: Sequence[Contender], rounds: int, turns: int, *, ask_loss: bool = True) -> dict[str, Result]:
    """Let contenders run rounds in turns: A B C, A B C, ...

    Args:
        contenders: The contenders.
        rounds: Rounds of a turn.
        turns: How many turns each has.
        ask_loss: Whether to request the loss of the global model at the end.
    """
    results = {contender.name: Result() for contender in contenders}
    with ExitStack() as stack:
        running: dict[Contender, Worker] = {}
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        for contender in contenders:
            if not is_installed(contender):
                results[contender.name].failure = f"{contender.module} is not installed for {contender.python}"
            else:
                running[contender] = stack.enter_context(Worker(contender, folder))
        for turn in range(-2, turns + 1):
            for contender, worker in list(running.items()):
                try:
                    _take_turn(worker, contender, results[contender.name], turn, turns, rounds, ask_loss)
                except (WorkerEndedError, BrokenPipeError) as error:
                    results[contender.name].failure = f"failed: {error}"
                    del running[contender]
    return results


def _take_turn(
    worker: Worker, contender: Contender, result: Result, turn: int, turns: int, rounds: int, ask_loss: bool
) -> None:
    """Run one turn: -2 waits for the start, -1 is a round to warm up, and the turn after the last requests the loss."""
    if turn == -2:
        worker.read()
        result.first_loss = worker.ask("loss")["loss"] if ask_loss else float("inf")
    elif turn == -1:
        worker.ask("rounds 1")
        result.rounds += 1
    elif turn < turns:
        count = max(1, rounds // contender.scale)
        report = worker.ask(f"rounds {count}")
        result.rounds += count
        result.cpu.append(report["cpu"] / count)
        result.wall.append(report["wall"] / count)
    elif ask_loss:
        result.loss = worker.ask("loss")["loss"]
        if contender.must_learn and not result.loss < result.first_loss:
            result.failure = f"did not learn: its loss went from {result.first_loss:.3f} to {result.loss:.3f}"


def is_installed(contender: Contender) -> bool:
    """Whether a contender's interpreter exists and has its module."""
    if not Path(contender.python).exists():
        return False
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({contender.module!r}) is None)"
    return subprocess.run([contender.python, "-c", look], check=False, capture_output=True).returncode == 0


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(values, reference, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, the minimum and the maximum, as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def report_failures(results: dict[str, Any]) -> list[str]:
    """One line per contender that gave no result."""
    lines = [f"* {name}: {result.failure}" for name, result in results.items() if result.failure]
    return ["", *lines] if lines else []
