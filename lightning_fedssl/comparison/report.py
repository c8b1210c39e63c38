"""The tables of a comparison.

``results.csv`` has a row for each run, ``curves.csv`` one for each evaluation, and ``pseudo_labels.csv`` one for each
round in which clients labelled images. ``results.md`` is for readers and ``results.tex`` for papers.
"""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.results import (
    Point,
    Result,
    Spread,
    first_reaching,
    median_to_target,
    paired_difference,
    spread,
)
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.storage.temporary import replace_file


@dataclass(frozen=True)
class Line:
    """An entry and the results of its seeds.

    Attributes:
        entry: The entry.
        results: Results of its finished runs, by seed.
        planned: Number of its runs, finished or not; None means that all are finished.
    """

    entry: SuiteEntry
    results: dict[int, Result]
    planned: int | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the entry is a bound."""
        return self.entry.role == "bound"

    @property
    def accuracies(self) -> dict[int, float]:
        """Test accuracy of the last round's model by seed, from 0 to 1; without runs that have none."""
        return {seed: r.test_accuracy for seed, r in self.results.items() if not math.isnan(r.test_accuracy)}

    @property
    def mean(self) -> float:
        """The mean test accuracy over seeds; NaN without any."""
        return spread(list(self.accuracies.values())).mean if self.accuracies else math.nan

    def to_target(self, target: float) -> list[Point | None]:
        """For every run the first point with at least this validation accuracy; None where there is none."""
        return [first_reaching(result.curve, target) for result in self.results.values()]


def lines_of(group: SuiteGroup, outcomes: Sequence[Outcome], planned: int | None = None) -> list[Line]:
    """The entries of a group with their results: first the bounds, then the methods by falling mean accuracy.

    Args:
        group: The group.
        outcomes: The runs that have ended.
        planned: The number of seeds of the suite; None: as many as have ended.
    """
    by_entry = {id(entry): [o for o in outcomes if o.run.entry is entry] for entry in group.entries}
    lines = [
        Line(entry, {o.run.seed: o.result for o in of_entry if o.result}, planned or len(of_entry))
        for entry in group.entries
        for of_entry in (by_entry[id(entry)],)
    ]
    return sorted(lines, key=lambda line: (not line.is_bound, 0.0 if line.is_bound else -_or(line.mean, -1.0)))


def write(folder: Path, suite: Suite, outcomes: Sequence[Outcome], command: str, plots: dict[str, str]) -> None:
    """Write the tables.

    Args:
        folder: The folder for the files.
        suite: The suite that was compared.
        outcomes: The outcome of every run.
        command: The command line of the comparison, which the report quotes.
        plots: Files of plots by their titles, relative to the folder.
    """
    in_order = sorted(outcomes, key=_place_in(suite))
    _write_csv(folder / "results.csv", [_result_row(suite, outcome) for outcome in in_order])
    _write_csv(folder / "curves.csv", _curve_rows(in_order))
    labels_file = folder / "pseudo_labels.csv"
    if labels := _label_rows(in_order):
        _write_csv(labels_file, labels)
    else:
        labels_file.unlink(missing_ok=True)  # of an earlier comparison with other methods
    _write_text(folder / "results.md", "\n".join(markdown(suite, outcomes, command, plots)) + "\n")
    _write_text(folder / "results.tex", "\n".join(latex(suite, outcomes)) + "\n")


def latex(suite: Suite, outcomes: Sequence[Outcome]) -> list[str]:
    """The tables as lines of LaTeX: one ``tabular`` per group, for a document that loads ``booktabs``."""
    report = [f"% {suite.title}: test accuracy in per cent, mean and standard deviation over the seeds"]
    for group in suite.groups:
        head, *rows = table_rows(group, lines_of(group, outcomes, len(suite.seeds)), suite.target)
        report += [f"% {group.title}", f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", "\\toprule", _latex_row(head)]
        report += ["\\midrule", *map(_latex_row, rows), "\\bottomrule", "\\end{tabular}"]
    return report


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_latex_text, cells)) + r" \\"


_LATEX = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\textasciitilde{}", "±": r"$\pm$", "*": ""}


def _latex_text(cell: str) -> str:
    return re.sub(r"[%&#_${}\\^~±*]", lambda found: _LATEX.get(found[0], f"\\{found[0]}"), cell)


def markdown(
    suite: Suite, outcomes: Sequence[Outcome], command: str = "", plots: dict[str, str] | None = None
) -> list[str]:
    """The report as lines of Markdown.

    Args:
        suite: The suite that was compared.
        outcomes: The outcome of every run.
        command: The command line of the comparison.
        plots: Files of plots by their titles.
    """
    report = [f"# {suite.title}", "", *_paragraph(suite.note), *_paragraph(_legend(suite, outcomes))]
    for group in suite.groups:
        lines = lines_of(group, outcomes, len(suite.seeds))
        report += [f"## {group.title}", "", *group_table(group, lines, suite.target), ""]
        report += _paragraph(group.note)
    for title, file in (plots or {}).items():
        report += [f"![{title}]({file})", ""]
    return report + ([f"`{command}`"] if command else [])


def _paragraph(text: str) -> list[str]:
    return [*textwrap.wrap(text, 120, break_long_words=False), ""] if text.strip() else []


def _legend(suite: Suite, outcomes: Sequence[Outcome]) -> str:
    seeds = ", ".join(map(str, suite.seeds))
    text = (
        f"Seeds {seeds}; every seed has its own partition and initial weights, the same for all entries of a group. "
        "*test* is the accuracy of the last round's model on the test images in per cent, mean ± standard deviation "
        "(n - 1) over seeds. *worst seed* is the lowest test accuracy of a seed. *best* is the highest validation "
        "accuracy of any round; it overestimates the accuracy on new images. *difference* is the mean ± standard "
        "deviation, in points, of the difference to the group's first bound with the same seed."
    )
    if suite.target is not None:
        text += (
            f" *to {suite.target:.0%}*: rounds, megabytes and simulated seconds until the validation accuracy first "
            "reached this target, as medians over seeds (for an even number of seeds the larger of the two "
            "middle values, which belongs to a run); in brackets the number of seeds that reached it, if not all."
        )
    if any(o.result and math.isfinite(o.result.seconds) for o in outcomes):
        text += " Seconds are simulated."
    return text


def group_table(group: SuiteGroup, lines: Sequence[Line], target: float | None) -> list[str]:
    """One group's table as lines of Markdown, and a line that names the methods below the first bound.

    Args:
        group: The group.
        lines: Its entries with results, as :func:`lines_of` returns them.
        target: An accuracy from 0 to 1, or None.
    """
    head, *rows = table_rows(group, lines, target)
    bound = _first_bound(group, lines)
    below = _below(bound, lines) if bound else []
    return [_cells(head), "|---" * len(head) + "|", *map(_cells, rows), *below]


def table_rows(group: SuiteGroup, lines: Sequence[Line], target: float | None) -> list[list[str]]:
    """The cells of one group's table: the header row, then rows of the same length.

    Args:
        group: The group.
        lines: Its entries with results, as :func:`lines_of` returns them.
        target: An accuracy from 0 to 1, or None.
    """
    goal = [] if target is None else [f"rounds to {target:.0%}", f"MB to {target:.0%}", f"s to {target:.0%}"]
    head = ["entry", "test", "worst seed", "difference", "best", *goal, "rounds", "MB", "seeds"]
    bound = _first_bound(group, lines)
    rows = [_entry_cells(line, bound, target) if line.results else [line.entry.label, "no run ended"] for line in lines]
    return [head, *(row + [""] * (len(head) - len(row)) for row in rows)]


def _first_bound(group: SuiteGroup, lines: Sequence[Line]) -> Line | None:
    first = next((entry for entry in group.entries if entry.role == "bound"), None)
    return next((line for line in lines if line.entry is first), None)


def _entry_cells(line: Line, bound: Line | None, target: float | None) -> list[str]:
    results, accuracies = list(line.results.values()), list(line.accuracies.values())
    difference = None
    if bound is not None and bound is not line:
        difference = paired_difference(line.accuracies, bound.accuracies)
    best = [result.best.accuracy for result in results if result.best]
    return [
        f"*{line.entry.label}* (bound)" if line.is_bound else line.entry.label,
        _percent(spread(accuracies)) if accuracies else "",
        f"{100 * min(accuracies):.1f}" if accuracies else "",
        _percent(difference, sign=True) if difference else "",
        _percent(spread(best)) if best else "",
        *(_goal_cells(line.to_target(target)) if target is not None else []),
        f"{max(result.rounds for result in results)}",
        _number(spread([result.bytes for result in results]).mean / 1e6),
        str(len(results)) if line.planned in (None, len(results)) else f"{len(results)} of {line.planned}",
    ]


def _goal_cells(points: list[Point | None]) -> list[str]:
    """Rounds, megabytes and simulated seconds to the target."""
    reached = sum(point is not None for point in points)
    share = f" ({reached} of {len(points)})" if reached < len(points) else ""
    rounds = median_to_target([None if point is None else point.round for point in points])
    megabytes = median_to_target([None if point is None else point.bytes / 1e6 for point in points])
    seconds = median_to_target([None if point is None else point.seconds for point in points])
    if rounds is None or megabytes is None or seconds is None:
        return [f"not reached{share}", "", ""]
    return [f"{rounds:.0f}{share}", _number(megabytes), _number(seconds) if math.isfinite(seconds) else ""]


def _below(bound: Line, lines: Sequence[Line]) -> list[str]:
    """A line that names the methods below the bound on average over the seeds of both."""
    gains = {
        line.entry.label: paired_difference(line.accuracies, bound.accuracies) for line in lines if not line.is_bound
    }
    below = [label for label, gain in gains.items() if gain and gain.mean < 0]
    return ["", f"**Below {bound.entry.label}: {', '.join(below)}.**"] if below else []


def _percent(value: Spread, sign: bool = False) -> str:
    mean = f"{100 * value.mean:+.1f}" if sign else f"{100 * value.mean:.1f}"
    return f"{mean} ± {100 * value.std:.1f}" if math.isfinite(value.std) else mean


def _number(value: float) -> str:
    """A number with at least three significant digits; an empty text for 0."""
    if value == 0:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cells(values: Iterable[str]) -> str:
    return "| " + " | ".join(value.replace("|", r"\|") for value in values) + " |"


def _place_in(suite: Suite) -> Any:
    places = {id(entry): index for index, entry in enumerate(suite.entries)}
    return lambda outcome: (places[id(outcome.run.entry)], outcome.run.seed)


def _result_row(suite: Suite, outcome: Outcome) -> dict[str, Any]:
    run, result = outcome.run, outcome.result
    row: dict[str, Any] = {
        "group": run.group.title, "label": run.entry.label, "role": run.entry.role, "seed": run.seed,
        "status": "finished" if result else outcome.how,
    }  # fmt: skip
    best = result.best if result else None
    goal = first_reaching(result.curve, suite.target) if result and suite.target is not None else None
    numbers: dict[str, Any] = {
        "rounds": result and result.rounds,
        "test_accuracy": result and result.test_accuracy,
        "test_loss": result and result.test_loss,
        "best_accuracy": best and best.accuracy,
        "best_round": best and best.round,
        "target": suite.target,
        "rounds_to_target": goal and goal.round,
        "bytes_to_target": goal and goal.bytes,
        "seconds_to_target": goal and goal.seconds,
        "bytes": result and result.bytes,
        "simulated_seconds": result and result.seconds,
        "wall_seconds": result and result.wall_seconds,
    }
    row |= {name: _plain(value) for name, value in numbers.items()}
    hashes = {"partition": run.start.partition[:12], "initial_weights": run.start.weights_hash[:12]}
    return row | hashes | {"code": run.code[:8], "config": " ".join(run.entry.files), "run": run.folder.name}


def _curve_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        {
            "label": outcome.run.entry.label, "seed": outcome.run.seed, "round": point.round,
            "accuracy": _plain(point.accuracy), "bytes": _plain(point.bytes), "seconds": _plain(point.seconds),
        }
        for outcome in outcomes
        if outcome.result
        for point in outcome.result.curve
    ]  # fmt: skip


def _label_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        {
            "label": outcome.run.entry.label, "seed": outcome.run.seed, "round": point.round,
            "mask_rate": _short(point.mask_rate), "confident_accuracy": _short(point.confident_accuracy),
            "all_accuracy": _short(point.all_accuracy), "round_s": _short(point.round_s),
        }
        for outcome in outcomes
        if outcome.result
        for point in outcome.result.labels
    ]  # fmt: skip


def _plain(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.10g}"


def _short(value: float) -> str:
    """Four decimals: shares of a round's images are no more precise, and there are many rows."""
    return f"{value:.4f}" if math.isfinite(value) else ""


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["label"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write_text(path, text.getvalue())


def _write_text(path: Path, text: str) -> None:
    replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))


def _or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise
