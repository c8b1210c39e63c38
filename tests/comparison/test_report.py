from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fedssl.comparison import report
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.task import Classification, Regression
from tests.comparison.helpers import GOOD, comparison, rounds_of


def test_the_table_holds_means_paired_differences_and_costs_to_the_target() -> None:
    """Good differs from the bound by 11, 12 and 16 points: mean 13, 4.303 sqrt(7 / 3) = 6.57."""
    suite, outcomes = comparison()
    lines = report.group_table(suite.groups[0], report.results_of(suite, outcomes), suite)
    best, never = "66.7 ± 49.1", ["not reached (0 of 3)", "", ""]
    twice = "-10.0 (no verdict: 2 times the bound's steps on labels)"
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert head == [
        "entry", "test", "worst seed", "difference to Bound", "best", "rounds to 90%", "MB to 90%", "s to 90%",
        "rounds", "steps on labels", "MB", "seeds",
    ]  # fmt: skip
    assert rows == [
        ["*Bound* (bound)", "60.0 ± 10.0", "50.0", "", "10.0 ± 0.0", *never, "4", "40", "40", "3"],
        ["Good", "73.0 ± 12.5", "61.0", "+13.0 (+6.4 to +19.6)", best, "2 (2 of 3)", "20", "2", "4", "42", "40", "3"],
        ["Bad", "40.0", "40.0", twice, "10.0", "not reached (0 of 1)", "", "", "4", "80", "40", "1 of 3"],
    ]  # fmt: skip


def test_the_tables_are_also_a_csv_and_latex(tmp_path: Path) -> None:
    suite, outcomes = comparison()
    suite.groups[0].title = "10 % of A_B"
    suite.groups.append(SuiteGroup("T", [SuiteEntry(r"R^2 ~{*}\mu", "t.yaml")]))
    suite.groups.append(SuiteGroup("H", [SuiteEntry("Other bound", "b.yaml", "bound"), SuiteEntry("Late", "g.yaml")]))
    report.write_tables(tmp_path, suite, report.results_of(suite, outcomes))

    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["entry"], row["test"]) for row in rows][1] == ("10 % of A_B", "Good", "73.0 ± 12.5")
    tex = (tmp_path / "results.tex").read_text()
    assert r"Good & 73.0 $\pm$ 12.5 & +13.0 (+6.4 to +19.6) \\" in tex
    assert r"Bound (bound) & 60.0" in tex
    assert r"R\textasciicircum{}2 \textasciitilde{}\{*\}\textbackslash{}mu & " in tex


def test_a_label_runs_no_command_of_latex() -> None:
    labels = {
        r"\input{x}": r"\textbackslash{}input\{x\} &",
        "R^2 ~ FedAvg*": r"R\textasciicircum{}2 \textasciitilde{} FedAvg* &",
        "[a]\n\\end": r"{}[a] \textbackslash{}end &",
        "*b": "{}*b &",
    }
    group = SuiteGroup("a\n\\input{y}", [SuiteEntry(label, "a.yaml") for label in labels])
    suite = Suite(title="t\n\\input{z}", seeds=[0], groups=[group])
    tex = report.latex(suite, report.Results(Classification(), {label: {} for label in labels}))
    assert not [line for line in tex if r"\input" in line and not line.startswith("%")]
    for written in labels.values():
        assert any(line.startswith(written) for line in tex)


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [((0.49, 0.62, 0.72), "; undecided"), ((0.4, 0.5, 0.6), "; contrary"), ((0.5, 0.6, 0.7), "+0.0; und")],
)
def test_a_difference_that_proves_nothing_says_so(accuracies: tuple[float, ...], said: str) -> None:
    suite, outcomes = comparison()
    for number, outcome in enumerate(outcomes):
        if outcome.run.entry.label == "Good":
            outcomes[number] = replace(outcome, rows=rounds_of(accuracies[outcome.run.seed], *GOOD))
    lines = report.group_table(suite.groups[0], report.results_of(suite, outcomes), suite)
    assert said in next(line for line in lines if line.startswith("| Good"))


def test_the_median_cost_counts_runs_that_did_not_get_there_as_the_worst() -> None:
    nan = math.nan
    assert report.median_to_target([3, 1, 2]) == 2
    assert report.median_to_target([3, nan, 2]) == 3
    assert report.median_to_target([3, nan, nan]) == math.inf
    assert report.median_to_target([1, 2, nan, nan]) == math.inf


def test_the_csv_files_hold_a_row_a_run_and_a_row_a_round(tmp_path: Path) -> None:
    suite, outcomes = comparison()
    report.write_csv_files(tmp_path, suite, outcomes)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["seed"], row["status"]) for row in rows] == [
        ("Bad", "0", "finished"), ("Bad", "1", "failed"), ("Bad", "2", "failed"), ("Bound", "0", "finished"),
        ("Bound", "1", "finished"), ("Bound", "2", "finished"), ("Good", "0", "finished"), ("Good", "1", "finished"),
        ("Good", "2", "finished"),
    ]  # fmt: skip
    good = rows[6]
    assert (good["test_accuracy"], good["rounds_to_target"], good["bytes_to_target"]) == ("0.61", "2", "20000000")
    assert rows[7]["rounds_to_target"] == rows[1]["test_accuracy"] == ""
    with (tmp_path / "curves.csv").open(newline="") as file:
        curves = list(csv.DictReader(file))
    assert len(curves) == 7 * len(GOOD)
    point = {"label": "Good", "seed": "0", "round": "1", "accuracy": "0.5", "bytes": "10000000", "seconds": "1"}
    assert curves[4 * len(GOOD)] == point


def test_an_error_is_better_if_it_is_smaller_and_no_per_cent(tmp_path: Path) -> None:
    suite, outcomes = comparison()
    suite.target = 2.0
    values = {"Bound": (5.0, 6.0, 7.0), "Good": (4.0, 4.9, 5.8), "Bad": (7.0, 8.1, 9.2)}
    errors = []
    for outcome in outcomes:
        rows = rounds_of(values[outcome.run.entry.label][outcome.run.seed], 4.0, 1.5, 3.0)
        renamed = [{name.replace("accuracy", "mae"): value for name, value in row.items()} for row in rows]
        errors.append(replace(outcome, rows=renamed, run=replace(outcome.run, task=Regression())))
    results = report.results_of(suite, errors)
    table = report.table_of(suite.groups[0], results, suite)
    assert [row[:6] for row in table] == [
        ["entry", "test", "worst seed", "difference to Bound", "best", "rounds to 2"],
        ["*Bound* (bound)", "6 ± 1", "7", "", "1.5 ± 0", "2"],
        ["Good", "4.9 ± 0.9", "5.8", "-1.1 (-1.35 to -0.852)", "1.5 ± 0", "2"],
        ["Bad", "8.1 ± 1.1", "9.2", "+2.1 (+1.85 to +2.35; contrary)", "1.5 ± 0", "2"],
    ]
    report.write_csv_files(tmp_path, suite, errors)
    with (tmp_path / "results.csv").open(newline="") as file:
        assert [row["test_mae"] for row in csv.DictReader(file)][:3] == ["7", "8.1", "9.2"]


def test_a_table_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the new table is written leaves the former one."""
    suite, outcomes = comparison()
    report.write_csv_files(tmp_path, suite, outcomes)
    before = (tmp_path / "results.csv").read_text()

    def full(file: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("csv.writer", full)
    with pytest.raises(OSError, match="No space left"):
        report.write_csv_files(tmp_path, suite, outcomes[:2])
    assert (tmp_path / "results.csv").read_text() == before
