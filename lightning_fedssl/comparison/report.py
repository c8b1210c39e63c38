"""The tables of a comparison.

``results.csv`` has a row for each run, and ``curves.csv`` one for each evaluation. ``summary.csv``
and ``results.tex`` have the tables of the page, for programs and papers.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.plan import code_version, hash_of
from lightning_fedssl.comparison.results import Row, curve, summary
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.comparison.verdicts import FEWEST, Paired, interval, verdict
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.storage.files import replace_file, write_table

if TYPE_CHECKING:
    from lightning_fedssl.task import Task

MOST_OTHER_STEPS = 0.1
"""The largest share by which an entry's steps on labels may differ from its bound's."""


@dataclass(frozen=True)
class Results:
    """The numbers of a suite's finished runs.

    Attributes:
        task: What their models predict; its first metric is compared.
        runs: The numbers (:func:`~lightning_fedssl.comparison.results.summary`) by label and seed.
    """

    task: Task
    runs: dict[str, dict[int, Row]]

    def values(self, label: str, name: str = "test") -> dict[int, float]:
        """The values of the metric by seed, without runs that have none.

        Args:
            label: Of the entry.
            name: ``test``, or ``best``.
        """
        found = map_values(itemgetter(f"{name}_{self.task.monitor}"), self.runs.get(label, {}))
        return {seed: value for seed, value in found.items() if math.isfinite(value)}


class Gain(NamedTuple):
    """What an entry gains over its group's first bound.

    Attributes:
        label: Of the entry.
        paired: The differences, positive where the entry is better.
        verdict: See :func:`~lightning_fedssl.comparison.verdicts.verdict`; ``no verdict`` where
            the steps on labels differ.
        steps: The steps on labels as a multiple of the bound's; NaN if they are not known.
    """

    label: str
    paired: Paired
    verdict: str
    steps: float


def write_csv_files(folder: Path, suite: Suite, outcomes: Sequence[Outcome]) -> None:
    """Write the CSV files.

    Args:
        folder: The folder for the files.
        suite: The suite that was compared.
        outcomes: The outcome of every run.
    """
    place = {entry.label: index for index, entry in enumerate(suite.entries)}
    results = []
    curves = []
    for outcome in sorted(outcomes, key=lambda one: (place[one.run.entry.label], one.run.seed)):
        run = {"label": outcome.run.entry.label, "seed": outcome.run.seed}
        results.append(_result_row(outcome, suite.target))
        curves += [run | _plain(row) for row in curve(outcome.rows, outcome.run.task)]
    _write_csv(folder / "results.csv", results)
    _write_csv(folder / "curves.csv", curves)


def write_tables(folder: Path, suite: Suite, results: Results) -> None:
    """Write ``summary.csv`` and ``results.tex``.

    Args:
        folder: The folder for the files.
        suite: The suite that was compared.
        results: The numbers of its finished runs.
    """
    rows = []
    for group in suite.groups:
        head, *cells = table_of(group, results, suite)
        rows += [dict(zip(["group", *head], [group.title, *row], strict=True)) for row in cells]
    _write_csv(folder / "summary.csv", rows)
    text = "\n".join(latex(suite, results)) + "\n"
    replace_file(folder / "results.tex", lambda new: new.write_text(text, encoding="utf-8"))


def results_of(suite: Suite, outcomes: Sequence[Outcome]) -> Results:
    """The numbers of the finished runs, by label and seed."""
    found = Results(outcomes[0].run.task, {entry.label: {} for entry in suite.entries})
    for outcome in outcomes:
        if outcome.rows:
            row = summary(outcome.rows, found.task, suite.target)
            place = outcome.run.data.get("label_location", "server")
            row["label_steps"] = row["server_steps" if place == "server" else "client_steps"]
            found.runs[outcome.run.entry.label][outcome.run.seed] = row
    return found


def legend(suite: Suite, task: Task) -> str:
    """What the columns of the tables mean."""
    metric = task.monitor.replace("_", " ")
    text = (
        f"Seeds {', '.join(map(str, suite.seeds))}; each has its own partition and initial "
        f"weights, the same for all entries of a group. *test*: {metric} of the last round's model "
        f"on the test images, mean ± standard deviation (n - 1) over seeds. *best*: the best "
        f"validation {metric} of any round, which overestimates. *difference*: mean difference to "
        f"the group's first bound with the same seeds, with its 95 % interval (Student's t) from "
        f"{FEWEST} seeds on: *undecided* if it contains 0, *contrary* if the bound is better. "
        "Shares are in per cent, their differences in points. *steps on labels*: of the server, or "
        "of the clients where they have "
        "the labels; where they differ by more than a tenth from the bound's, the difference is "
        "not that of the methods alone, and no verdict is given."
    )
    if suite.target is not None:
        text += (
            f" *to {_target(suite, task)}*: until the validation {metric} first reached this "
            "target, as medians over seeds (of two middle values the larger); in brackets the "
            "number of seeds that reached it. Seconds are simulated."
        )
    return text


def group_table(group: SuiteGroup, results: Results, suite: Suite) -> list[str]:
    """One group's table as lines of Markdown.

    Args:
        group: The group.
        results: The numbers of the finished runs.
        suite: Its suite.
    """
    head, *rows = table_of(group, results, suite)
    return [_line(head), "|---" * len(head) + "|", *map(_line, rows)]


def table_of(group: SuiteGroup, results: Results, suite: Suite) -> list[list[str]]:
    """One group's table: its head, and a row for each entry.

    Args:
        group: The group.
        results: The numbers of the finished runs.
        suite: Its suite.
    """
    baseline = _baseline(group)
    gains = gains_of(group, results)
    versus = f"difference to {baseline}" if baseline else "difference"
    head = ["entry", "test", "worst seed", versus, "best"]
    if suite.target is not None:
        target = _target(suite, results.task)
        head += [f"rounds to {target}", f"MB to {target}", f"s to {target}"]
    head += ["rounds", "steps on labels", "MB", "seeds"]
    table = [head]
    for entry in _ordered(group, gains, results):
        if results.runs[entry.label]:
            table.append(_cells(entry, results, gains.get(entry.label), suite))
        else:
            table.append([entry.label, "no run ended", *[""] * (len(head) - 2)])
    return table


def gains_of(group: SuiteGroup, results: Results) -> dict[str, Gain]:
    """What the entries of a group gain over its first bound, by their labels, the most first.

    Args:
        group: The group.
        results: The numbers of the finished runs.
    """
    baseline = _baseline(group)
    steps = _label_steps(results.runs.get(baseline, {}))
    bound = results.values(baseline)
    sign = 1 if results.task.larger_is_better else -1
    gains = []
    for entry in group.entries:
        values = results.values(entry.label)
        differences = [sign * (values[seed] - bound[seed]) for seed in values if seed in bound]
        if entry.label == baseline or not differences:
            continue
        own_steps = _label_steps(results.runs[entry.label]) / steps if steps else math.nan
        fair = not abs(own_steps - 1) > MOST_OTHER_STEPS
        said = verdict(differences) if fair else "no verdict"
        gains.append(Gain(entry.label, interval(differences), said, own_steps))
    return {gain.label: gain for gain in sorted(gains, key=lambda gain: -gain.paired.mean)}


def conclusion(group: SuiteGroup, results: Results) -> str:
    """What a group's comparison has shown, in one sentence; empty without a bound, or as long as no
    entry has the seeds of an interval.

    Args:
        group: The group.
        results: The numbers of the finished runs.
    """
    gains = gains_of(group, results)
    baseline = _baseline(group)
    if all(gain.paired.count < FEWEST for gain in gains.values()):
        return ""
    won = [gain for gain in gains.values() if gain.verdict == "met"]
    if not won:
        return f"No entry is shown to be better than {baseline}"
    task, best = results.task, won[0]
    found = best.paired
    mean, low, high = (
        task.format_value(value, "+") for value in (found.mean, found.low, found.high)
    )
    more = f"; so are {len(won) - 1} more entries" if len(won) > 1 else ""
    unit = " points" if task.is_share else ""
    return f"{best.label} is better than {baseline} by {mean}{unit} ({low} to {high}){more}"


def latex(suite: Suite, results: Results) -> list[str]:
    """The tables of all groups for a paper: entry, test and difference, as lines of LaTeX.

    They need the package booktabs.

    Args:
        suite: The suite that was compared.
        results: The numbers of its finished runs.
    """
    lines = [f"% {_one_line(suite.title)}: mean and standard deviation over seeds; 95 % intervals."]
    for group in suite.groups:
        head, *rows = table_of(group, results, suite)
        shown = itemgetter(0, 1, 3)
        lines += ["", f"% {_one_line(group.title)}", r"\begin{tabular}{lll}", r"\toprule"]
        lines += [_tex_line(shown(head)), r"\midrule", *map(_tex_line, map(shown, rows))]
        lines += [r"\bottomrule", r"\end{tabular}"]
    return lines


def _tex_line(cells: Iterable[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


_TEX = str.maketrans(
    {special: rf"\{special}" for special in "&%#_${}"}
    | {"^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}"}
    | {"±": r"$\pm$"}
)


def _escaped(text: str) -> str:
    """A cell of Markdown in LaTeX, without the stars around a bound; no command in it runs."""
    plain = re.sub(r"^\*(.*)\* \(bound\)$", r"\1 (bound)", _one_line(text))
    # After the end of a row LaTeX takes these two for an option.
    return "{}" * plain.startswith(("[", "*")) + plain.translate(_TEX)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _target(suite: Suite, task: Task) -> str:
    return f"{suite.target:.0%}" if task.is_share else f"{suite.target:g}"


def _baseline(group: SuiteGroup) -> str:
    """The label of a group's first bound; empty without one."""
    return next((entry.label for entry in group.entries if entry.role == "bound"), "")


def _ordered(group: SuiteGroup, gains: Mapping[str, Gain], results: Results) -> list[SuiteEntry]:
    """First the bounds, then the methods, the largest gain first; without a bound the best mean."""

    def goodness(entry: SuiteEntry) -> float:
        if entry.role == "bound":
            return math.inf
        if entry.label in gains:
            return gains[entry.label].paired.mean
        mean = statistics.fmean(results.values(entry.label).values() or [0.0])
        return mean if results.task.larger_is_better else -mean

    return sorted(group.entries, key=goodness, reverse=True)


def _cells(entry: SuiteEntry, results: Results, gain: Gain | None, suite: Suite) -> list[str]:
    task = results.task
    runs = results.runs[entry.label]
    values = results.values(entry.label)
    own_steps = _label_steps(runs)
    worst = min if task.larger_is_better else max
    return [
        f"*{entry.label}* (bound)" if entry.role == "bound" else entry.label,
        _spread(task, values),
        task.format_value(worst(values.values())) if values else "",
        _difference(task, gain) if gain else "",
        _spread(task, results.values(entry.label, "best")),
        *(_goal_cells(list(runs.values())) if suite.target is not None else []),
        f"{max(row['rounds'] for row in runs.values()):.0f}",
        f"{own_steps:,.0f}" if math.isfinite(own_steps) else "",
        _number(statistics.fmean(row["bytes"] for row in runs.values()) / 1e6),
        str(len(runs)) if len(runs) == len(suite.seeds) else f"{len(runs)} of {len(suite.seeds)}",
    ]


def _label_steps(runs: Mapping[int, Row]) -> float:
    """The mean number of steps on labels; NaN without runs, or where it was not logged."""
    return statistics.fmean(row["label_steps"] for row in runs.values()) if runs else math.nan


def _difference(task: Task, gain: Gain) -> str:
    """The mean difference with its interval, and the verdict where that is not *met*."""
    sign = 1 if task.larger_is_better else -1
    ends = sorted(sign * end for end in (gain.paired.low, gain.paired.high))
    mean, low, high = (task.format_value(value, "+") for value in (sign * gain.paired.mean, *ends))
    if gain.verdict == "no verdict":
        return f"{mean} (no verdict: {gain.steps:.2g} times the bound's steps on labels)"
    if gain.paired.count < FEWEST:
        return f"{mean} ({gain.verdict})"
    return f"{mean} ({low} to {high}{'' if gain.verdict == 'met' else f'; {gain.verdict}'})"


def _goal_cells(runs: Sequence[Row]) -> list[str]:
    """Rounds, megabytes and simulated seconds to the target."""
    rounds = [row["rounds_to_target"] for row in runs]
    reached = sum(map(math.isfinite, rounds))
    share = f" ({reached} of {len(runs)})" if reached < len(runs) else ""
    middle = median_to_target(rounds)
    if not math.isfinite(middle):
        return [f"not reached{share}", "", ""]
    sent = median_to_target([row["bytes_to_target"] for row in runs])
    seconds = median_to_target([row["seconds_to_target"] for row in runs])
    return [f"{middle:.0f}{share}", _number(sent / 1e6), _number(seconds)]


def median_to_target(costs: Sequence[float]) -> float:
    """The median over runs of the cost of reaching a target.

    NaN for a run that did not reach it counts as infinite.

    Unlike the mean over the runs that reached the target, the median does not improve when
    difficult runs fail. For an even number of runs it is the larger of the two middle values.

    Args:
        costs: The cost of every run, at least one.
    """
    return sorted(cost if math.isfinite(cost) else math.inf for cost in costs)[len(costs) // 2]


def _spread(task: Task, by_seed: Mapping[int, float]) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    values = [*by_seed.values()]
    numbers = [statistics.fmean(values)] if values else []
    numbers += [statistics.stdev(values)] if len(values) > 1 else []
    return " ± ".join(map(task.format_value, numbers))


def _number(value: float) -> str:
    """A number with at least three significant digits; an empty text for 0 and infinity."""
    if value == 0 or math.isinf(value):
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _result_row(outcome: Outcome, target: float | None) -> dict[str, Any]:
    run = outcome.run
    return {
        "group": run.group.title,
        "label": run.entry.label,
        "role": run.entry.role,
        "seed": run.seed,
        "status": "finished" if outcome.rows else outcome.how,
        **(_plain(summary(outcome.rows, run.task, target)) if outcome.rows else {}),
        "partition": run.partition[:12],
        "initial_weights": hash_of(run.weights)[:12],
        "code": code_version(),
        "config": " ".join(run.entry.files),
        "run": run.folder.name,
    }


def _plain(row: Row) -> dict[str, str]:
    return {name: f"{value:.10g}" if math.isfinite(value) else "" for name, value in row.items()}


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows; the columns are those of all rows, in the order in which they first appear."""
    columns = list(dict.fromkeys(chain(*rows))) or ["label"]
    write_table(path, [columns, *([row.get(name, "") for name in columns] for row in rows)])
