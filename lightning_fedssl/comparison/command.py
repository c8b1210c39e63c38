"""The ``compare`` command: trains the runs that have no result yet, and writes tables and plots."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_fedssl.comparison import plots, records, report
from lightning_fedssl.comparison.code_watch import CodeWatch
from lightning_fedssl.comparison.execute import Executor, Outcome, terminable
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.recorded import RecordedRun, take
from lightning_fedssl.comparison.results import result_of
from lightning_fedssl.comparison.suite import Suite


def compare(
    suite: Suite,
    runs: Sequence[Run],
    folder: Path,
    jobs: int,
    command: Sequence[str],
    command_line: str,
    only: Collection[str] | None = None,
    recorded: Iterable[RecordedRun] = (),
) -> int:
    """Train the runs of a suite that have no result yet, and report on all of them.

    Args:
        suite: The suite to compare.
        runs: The runs of the suite.
        folder: The folder for runs, tables and plots.
        jobs: The number of runs trained at the same time.
        command: The program that runs ``fit``, with the arguments before ``fit``.
        command_line: The user's command line, which the report quotes.
        only: Labels of the entries to train; the others are reported as far as they have finished. None: all.
        recorded: Finished runs that are known from other folders. A run that has finished in ``folder`` is not taken.

    Returns:
        The exit code: 0 if all runs finished, 1 if a run failed, 130 if the comparison was interrupted.

    Raises:
        ValueError: If a recorded run cannot be compared; see :func:`~lightning_fedssl.comparison.recorded.take`.
    """
    finished = {run.key for run in runs if result_of(run)}
    elsewhere = [outcome for outcome in take(runs, recorded, _say) if outcome.run.key not in finished]
    taken = {outcome.run.key for outcome in elsewhere}
    wanted = [run for run in runs if only is None or run.entry.label in only or run.key in finished]
    chosen = [run for run in wanted if run.key not in taken]
    interrupted = False
    with Display(len(elsewhere) + len(chosen)) as display, terminable():
        for outcome in elsewhere:
            display.ended(outcome)
        watch = CodeWatch(display.console.print)
        executor = Executor(command, jobs, display.ended, display.training, watch.current)
        try:
            executor.execute(chosen)
        except KeyboardInterrupt:
            interrupted = True
    outcomes = [*elsewhere, *executor.outcomes]
    if any(outcome.result for outcome in outcomes):
        _write(folder, suite, outcomes, command_line, display.console)
    for line in without_accuracy(outcomes):
        sys.stderr.write(line)
    failed = [outcome for outcome in outcomes if outcome.how == "failed"]
    for outcome in failed:
        sys.stderr.write(f"error: {outcome.run.name} failed; see {outcome.log}\n")
    if interrupted:
        sys.stderr.write("interrupted; run the same command again to resume\n")
        return 130
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _write(folder: Path, suite: Suite, outcomes: Sequence[Outcome], command_line: str, console: Console) -> None:
    groups = {group.title: report.lines_of(group, outcomes, len(suite.seeds)) for group in suite.groups}
    files = plots.draw(folder, suite.title, groups, suite.target)
    report.write(folder, suite, outcomes, command_line, files)
    for group in suite.groups:
        console.print("", group.title, *report.group_table(group, groups[group.title], suite.target), sep="\n")
    console.print("", f"tables and plots: {folder}", sep="\n")


class Display:
    """Prints one line for every run that ended; on a terminal it also shows a progress bar.

    Args:
        total: Number of runs.
    """

    def __init__(self, total: int) -> None:
        self.console = Console(soft_wrap=True, highlight=False, markup=False)
        self.total = total
        self.done = 0
        columns = (
            TextColumn("run"), MofNCompleteColumn(), BarColumn(bar_width=16), TimeRemainingColumn(),
            TextColumn("{task.fields[line]}", markup=False),
        )  # fmt: skip
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._progress.add_task("runs", total=total, line="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def ended(self, outcome: Outcome) -> None:
        """Print the line of a run that ended."""
        self.done += 1
        self._progress.update(self._task, completed=self.done)
        self._progress.print(f"[{self.done}/{self.total}] {line_of(outcome)}")

    def training(self, runs: Sequence[Run]) -> None:
        """Show next to the bar which runs are training, and their current rounds."""
        if not self._progress.disable:
            self._progress.update(self._task, line=", ".join(f"{run.name}: round {_round(run)}" for run in runs))


def without_accuracy(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each entry whose method logs no test accuracy."""
    labels = [o.run.entry.label for o in outcomes if o.result and math.isnan(o.result.test_accuracy)]
    remedy = "its cells are empty; let the method's test_step return the logits"
    return [f"{label} logs no test/accuracy: {remedy}\n" for label in dict.fromkeys(labels)]


def line_of(outcome: Outcome) -> str:
    """One line about a run that ended: its name, its test accuracy or its problem, and its wall-clock time."""
    if outcome.result is None:
        stopped = "stopped; run the same command again to resume"
        problem = stopped if outcome.how == "stopped" else f"FAILED, see {outcome.log}"
        return f"{outcome.run.name}: {problem}"
    known = not math.isnan(outcome.result.test_accuracy)
    accuracy = f"test accuracy {outcome.result.test_accuracy:.1%}" if known else "no test accuracy"
    time = outcome.how if outcome.how in ("cached", "recorded") else f"{outcome.how} in {outcome.seconds:.0f} s"
    return f"{outcome.run.name}: {accuracy}, {time}"


def _round(run: Run) -> str:
    rows = records.rounds(run.folder)
    last = int(rows[-1]["step"]) if rows else 0
    return f"{last}/{run.resolved.config['trainer']['max_rounds']}"
