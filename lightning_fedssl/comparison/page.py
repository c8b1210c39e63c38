"""The page of a comparison: ``report.html`` in its folder, which leads to the pages of the runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.plan import Run, differing_keys
from lightning_fedssl.comparison.report import (
    conclusion,
    gains_of,
    legend,
    results_of,
    table_of,
)
from lightning_fedssl.comparison.results import curve, summary
from lightning_fedssl.comparison.suite import Suite, SuiteGroup
from lightning_fedssl.comparison.verdicts import FEWEST
from lightning_fedssl.report import FILE_NAME, page
from lightning_fedssl.storage.files import versions


def write_page(
    folder: Path,
    suite: Suite,
    runs: Sequence[Run],
    outcomes: Sequence[Outcome],
    command: str,
    live: bool,
) -> None:
    """Write the page.

    Args:
        folder: The folder of the comparison.
        suite: The suite that is compared.
        runs: All its runs.
        outcomes: Those that have ended.
        command: The command line of the comparison.
        live: Whether more runs will end.
    """
    task = runs[0].task
    groups, said = [], []
    for group in suite.groups if outcomes else ():
        results = results_of(suite, outcomes)
        head, *rows = table_of(group, results, suite)
        gains = [gain for gain in gains_of(group, results).values() if gain.paired.count >= FEWEST]
        if sentence := conclusion(group, results):
            said.append(f"{group.title}: {sentence}")
        curves = {
            "round": _curves(group, outcomes, "round", 1.0),
            "bytes": _curves(group, outcomes, "bytes", 1e6),
        }
        differing = differing_keys([run for run in runs if run.group.title == group.title])
        groups.append((group, head, rows, curves, differing, gains))
    ended = {outcome.run.folder: outcome for outcome in outcomes}
    page.write(
        folder / FILE_NAME,
        "comparison.html",
        live,
        suite=suite,
        task=task,
        legend=legend(suite, task),
        groups=groups,
        said=said,
        finished=sum(bool(outcome.rows) for outcome in outcomes),
        runs=[(run, _page_of(run, folder), *_end_of(ended.get(run.folder))) for run in runs],
        command=command,
    )


def _curves(
    group: SuiteGroup, outcomes: Sequence[Outcome], place: str, unit: float
) -> page.Chart | None:
    """The first metric of every entry in validation, means over the seeds as far as all have
    evaluations, and the area between the lowest and the highest seed.

    Args:
        group: The group.
        outcomes: Runs that have ended.
        place: The column of :func:`~lightning_fedssl.comparison.results.curve` that is the
            horizontal axis.
        unit: Its unit.
    """
    lines: dict[str, page.Points] = {}
    bands: dict[str, page.Points] = {}
    for entry in group.entries:
        name = f"{entry.label} (bound)" if entry.role == "bound" else entry.label
        ended = [one for one in outcomes if one.run.entry is entry and one.rows]
        mean, low, high = page.Points(), page.Points(), page.Points()
        for rows in zip(*[curve(one.rows, one.run.task) for one in ended], strict=False):
            x = fmean(row[place] for row in rows) / unit
            ys = [row[ended[0].run.task.monitor] for row in rows]
            if x and math.isfinite(sum(ys)):  # without bytes there is no curve over them
                mean.append((x, fmean(ys)))
                low.append((x, min(ys)))
                high.append((x, max(ys)))
        lines[name], bands[name] = mean, low + high[::-1]
    return page.chart_of(lines, bands)


def _page_of(run: Run, folder: Path) -> str:
    """The page of a run's last attempt, relative to a folder; empty if there is none."""
    for version in reversed(versions(run.folder)):
        if (version / FILE_NAME).is_file():
            return Path(os.path.relpath(version / FILE_NAME, folder)).as_posix()
    return ""


def _end_of(outcome: Outcome | None) -> tuple[str, str]:
    """How a run ended, and its result on the test samples."""
    if outcome is None or not outcome.rows:
        return "not ended" if outcome is None else outcome.how, ""
    task = outcome.run.task
    return "finished", task.format_value(summary(outcome.rows, task)[f"test_{task.monitor}"])
