"""The ``compare`` command: trains the runs that have no result yet, and writes a report."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from lightning_fedssl.comparison import report
from lightning_fedssl.comparison.execute import Command, Outcome, terminable, train
from lightning_fedssl.comparison.page import write_page
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.progress import SuiteProgress
from lightning_fedssl.comparison.results import is_finished, rounds, summary
from lightning_fedssl.comparison.suite import Suite
from lightning_fedssl.report import FILE_NAME


def compare(
    suite: Suite,
    runs: Sequence[Run],
    folder: Path,
    jobs: int,
    command: Command,
    command_line: str,
    only: Collection[str] | None = None,
) -> int:
    """Train the runs of a suite that have no result yet, and report on all of them.

    Args:
        suite: The suite to compare.
        runs: The runs of the suite.
        folder: The folder for runs, tables and page.
        jobs: The number of runs trained at the same time.
        command: What runs ``fit``.
        command_line: The user's command line, which the report quotes.
        only: Labels of the entries to train; the others are reported as far as they have finished.
            None: all.

    Returns:
        The exit code: 0 if all runs finished, 1 if a run failed, 130 if the comparison was
            interrupted.
    """
    wanted = []
    known = []
    for run in runs:
        if only is None or run.entry.label in only:
            wanted.append(run)
        elif is_finished(rows := rounds(run.folder)):
            known.append(Outcome(run, rows, "cached"))
    outcomes: list[Outcome] = []

    def show(live: bool = True) -> None:
        write_page(folder, suite, runs, [*outcomes, *known], command_line, live)

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"[{len(outcomes)}/{len(wanted)}] {line_of(outcome)}", flush=True)
        if outcome.how != "cached":
            show()

    interrupted = False
    show()
    with terminable():
        try:
            train(wanted, command, jobs, ended, SuiteProgress(wanted).show)
        except KeyboardInterrupt:
            interrupted = True
    outcomes += known
    if any(outcome.rows for outcome in outcomes):
        _write(folder, suite, outcomes)
    show(live=False)
    failed = [outcome for outcome in outcomes if outcome.how == "failed"]
    for outcome in failed:
        sys.stderr.write(f"error: {outcome.run.name} failed; see {outcome.run.folder}/log.txt\n")
    if interrupted:
        sys.stderr.write("interrupted; run the same command again to resume\n")
        return 130
    return 1 if failed else 0


def _write(folder: Path, suite: Suite, outcomes: Sequence[Outcome]) -> None:
    results = report.results_of(suite, outcomes)
    report.write_csv_files(folder, suite, outcomes)
    report.write_tables(folder, suite, results)
    for group in suite.groups:
        print("", group.title, *report.group_table(group, results, suite), sep="\n")
    print("", f"tables and {FILE_NAME}: {folder}", sep="\n")


def line_of(outcome: Outcome) -> str:
    """One line about a run that ended: its name, its test result or its problem, and its
    wall-clock time.
    """
    run, task = outcome.run, outcome.run.task
    if outcome.how == "stopped":
        return f"{run.name}: stopped; run the same command again to resume"
    if not outcome.rows:
        return f"{run.name}: FAILED, see {run.folder}/log.txt"
    found = summary(outcome.rows, task)[f"test_{task.monitor}"]
    text = f"its method logs no test/{task.monitor}"
    if math.isfinite(found):
        text = f"test {task.monitor} {task.format_value(found)}{' %' if task.is_share else ''}"
    time = "" if outcome.how == "cached" else f" in {outcome.seconds:.0f} s"
    return f"{run.name}: {text}, {outcome.how}{time}"
