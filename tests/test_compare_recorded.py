"""Suites that are trained in parts: ``compare --only`` and ``compare --recorded``."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fedssl.cli import main
from lightning_fedssl.comparison import plots, report
from lightning_fedssl.comparison.code_version import code_version
from lightning_fedssl.comparison.command import compare
from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.plan import Run, Start
from lightning_fedssl.comparison.recorded import read_folder, take
from lightning_fedssl.comparison.results import LabelPoint, Point, Result, result_from
from lightning_fedssl.comparison.suite import Suite, SuiteGroup
from tests.fake_runs import FAKE, run_of
from tests.forked_command import ForkedCommand

TABLES = ("results.csv", "curves.csv", "pseudo_labels.csv")

LABELS = [LabelPoint(1, 0.0, math.nan, 0.25, 1.5), LabelPoint(2, 0.5, 0.75, 0.5, 2.5)]
RESULT = Result(0.8, 0.3, 2, [Point(2, 0.7, 64.0, math.nan)], 64.0, math.nan, 4.0, LABELS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take most of the time of a comparison without training."""
    monkeypatch.setattr(plots, "draw", lambda *arguments: {})


def suite_of(*runs: Run) -> tuple[Suite, list[Run]]:
    """A suite of one group with these runs, which have the hash of the present code."""
    entries = {run.entry.label: run.entry for run in runs}
    group = SuiteGroup("G", list(entries.values()))
    code = code_version(runs[0].resolved.config)
    placed = [replace(run, group=group, entry=entries[run.entry.label], code=code) for run in runs]
    return Suite("T", [group], sorted({run.seed for run in runs})), placed


def record(folder: str, *outcomes: Outcome) -> None:
    """Write the tables of runs that have ended."""
    Path(folder).mkdir(exist_ok=True)
    entries = {outcome.run.entry.label: outcome.run.entry for outcome in outcomes}
    seeds = sorted({outcome.run.seed for outcome in outcomes})
    group = SuiteGroup("G", list(entries.values()))
    placed = [replace(o, run=replace(o.run, entry=entries[o.run.entry.label])) for o in outcomes]
    report.write(Path(folder), Suite("T", [group], seeds), placed, "the command", {})


def rows_of(file: str) -> list[dict[str, str]]:
    with Path(file).open(newline="") as table:
        return list(csv.DictReader(table))


def trained(runs: list[Run]) -> list[str]:
    return [run.name for run in runs if (run.folder / "log.txt").exists()]


# What a run logs of its pseudo-labels.


def test_the_points_of_pseudo_labels_are_the_rounds_in_which_clients_labelled_images() -> None:
    rows = [
        {"step": 1, "time/round_s": 1.0},
        {"step": 2, "client/mask_rate": 0.0, "pseudo_label/accuracy": 0.25, "time/round_s": 1.5},
        {"step": 3, "client/mask_rate": 0.5, "pseudo_label/accuracy": 0.5, "pseudo_label/confident_accuracy": 0.75},
    ]
    first, second = result_from(rows).labels
    assert (first.round, first.mask_rate, first.all_accuracy, first.round_s) == (2, 0.0, 0.25, 1.5)
    assert math.isnan(first.confident_accuracy)
    assert (second.round, second.mask_rate, second.confident_accuracy, second.all_accuracy) == (3, 0.5, 0.75, 0.5)


def test_the_table_of_pseudo_labels_has_a_row_a_round_and_the_plots_a_line_for_what_is_known() -> None:
    silent = replace(RESULT, labels=[])
    runs = [run_of("A"), run_of("A", seed=1), run_of("B")]
    suite, placed = suite_of(*runs)
    outcomes = [Outcome(run, result, "trained") for run, result in zip(placed, (RESULT, RESULT, silent), strict=True)]
    report.write(Path(), suite, outcomes, "the command", {})
    rows = rows_of("pseudo_labels.csv")
    assert [(row["label"], row["seed"], row["round"]) for row in rows] == [
        ("A", "0", "1"), ("A", "0", "2"), ("A", "1", "1"), ("A", "1", "2"),
    ]  # fmt: skip
    assert rows[0] | {"seed": ""} == {
        "label": "A", "seed": "", "round": "1", "mask_rate": "0.0000", "confident_accuracy": "",
        "all_accuracy": "0.2500", "round_s": "1.5000",
    }  # fmt: skip
    groups = {group.title: report.lines_of(group, outcomes) for group in suite.groups}
    files = plots.draw(Path(), suite.title, groups, None)
    assert {"mask_rate.png", "confident_accuracy.png"} <= set(files.values())
    confident = plots.KINDS["confident_accuracy"]
    assert [confident.of(line) for line in groups["G"]] == [[[(2, 75.0)], [(2, 75.0)]], []]


def test_seeds_are_averaged_by_round_and_not_by_place() -> None:
    """Seed 0 has rounds 1 to 3, seed 1 round 2 alone, and seed 2 none."""
    first = [LabelPoint(n, 0.1 * n, math.nan, math.nan, 1.0) for n in (1, 2, 3)]
    results = [replace(RESULT, labels=labels) for labels in (first, first[1:2], [])]
    line = report.Line(run_of("A").entry, dict(enumerate(results)))
    (long, short) = plots.KINDS["mask_rate"].of(line)
    assert long == [(1, 10.0), (2, 20.0)]
    assert [math.isnan(short[0][1]), short[1]] == [True, (2, 20.0)]
    assert plots._places(line, plots.KINDS["mask_rate"]) == [1, 2]


def test_a_round_that_only_one_seed_knows_has_the_mean_of_that_seed() -> None:
    assert plots._spread_of_known([math.nan, 75.0]).mean == 75.0
    assert math.isnan(plots._spread_of_known([math.nan, math.nan]).mean)


def test_a_comparison_without_pseudo_labels_has_no_table_of_them_and_deletes_that_of_an_earlier_one() -> None:
    record("part", Outcome(run_of("A"), RESULT, "trained"))
    assert Path("part/pseudo_labels.csv").exists()
    record("part", Outcome(run_of("A"), replace(RESULT, labels=[]), "trained"))
    assert not Path("part/pseudo_labels.csv").exists()


# Reading and joining tables.


def test_tables_give_back_the_results_that_were_written() -> None:
    run = run_of("A, with a comma", seed=3)
    record("part", Outcome(run, RESULT, "trained"), Outcome(run_of("B"), None, "failed"))
    (one,) = read_folder(Path("part"))
    assert one.key == ("A, with a comma", 3)
    assert one.result == RESULT


def test_recorded_runs_keep_the_name_and_code_with_which_they_were_trained() -> None:
    then = replace(run_of("A"), code="0ldc0de0", folder=Path("runs/a/seed_0_other"))
    record("part", Outcome(then, RESULT, "trained"))
    said: list[str] = []
    (outcome,) = take([run_of("A"), run_of("A", seed=1)], read_folder(Path("part")), said.append)
    assert (outcome.how, outcome.result) == ("recorded", RESULT)
    assert (outcome.run.folder.name, outcome.run.code) == ("seed_0_other", "0ldc0de0")
    assert said == ["recorded with other settings or by other code (see run and code in results.csv): A, seed 0"]


def test_the_first_of_many_runs_are_named_that_the_suite_does_not_have() -> None:
    record("part", *(Outcome(run_of("B", seed=seed), RESULT, "trained") for seed in range(5)))
    said: list[str] = []
    assert take([run_of("A")], read_folder(Path("part")), said.append) == []
    assert said == ["recorded, but not in the suite: B, seed 0; B, seed 1; B, seed 2; and 2 more"]


@pytest.mark.parametrize(
    ("start", "differing"),
    [
        (Start("q", {"w": "1"}), "another partition"),
        (Start("p", {"w": "2"}), "other initial weights"),
        (Start("q", {"w": "2"}), "another partition and other initial weights"),
    ],
)
def test_a_run_with_another_beginning_is_refused(start: Start, differing: str) -> None:
    record("part", Outcome(run_of("A", start), RESULT, "trained"))
    with pytest.raises(ValueError, match=f"^A, seed 0: the run in part began with {differing} than this suite gives"):
        take([run_of("A")], read_folder(Path("part")))


def test_two_folders_may_have_the_same_run_but_not_other_numbers_of_it() -> None:
    run = run_of("A")
    record("one", Outcome(run, RESULT, "trained"))
    record("two", Outcome(run, replace(RESULT, labels=[], wall_seconds=9.0), "trained"))
    record("three", Outcome(run, replace(RESULT, test_accuracy=0.81), "trained"))
    parts = [read_folder(Path(name)) for name in ("one", "two", "three")]
    assert [o.result for o in take([run], parts[0] + parts[1])] == [RESULT]
    with pytest.raises(ValueError, match=r"^A, seed 0: one and three have different results; leave one of the folders"):
        take([run], parts[0] + parts[2])


@pytest.mark.parametrize("content", ["", "label,seed\nA,0\n", "label,seed,status,run\nA,0,finished,x\n"])
def test_a_file_that_is_no_table_is_refused(content: str) -> None:
    Path("part").mkdir()
    Path("part/results.csv").write_text(content)
    if not content:
        assert read_folder(Path("part")) == []
        return
    with pytest.raises(ValueError, match=r"^part: its CSV files are no tables of a comparison"):
        read_folder(Path("part"))


# The command.


@pytest.mark.usefixtures("no_plots")
def test_parts_give_the_tables_of_a_whole_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """Two seeds of A in one folder, B in another; the third folder has no run of its own."""
    suite, runs = suite_of(run_of("A"), run_of("A", seed=1), run_of("B"), run_of("B", seed=1))
    assert compare(suite, runs, Path("whole"), 2, FAKE, "the command") == 0
    expected = {name: rows_of(f"whole/{name}") for name in TABLES[:2]}
    shutil.rmtree("runs")
    for label in "AB":
        assert compare(suite, runs, Path(f"part_{label}"), 2, FAKE, "the command", [label]) == 0
        assert {row["label"] for row in rows_of(f"part_{label}/results.csv")} == {label}
        shutil.rmtree("runs")
    capsys.readouterr()
    recorded = [run for label in "AB" for run in read_folder(Path(f"part_{label}"))]
    assert compare(suite, runs, Path("joined"), 1, FAKE, "the command", [], recorded) == 0
    assert trained(runs) == []
    out, err = capsys.readouterr()
    assert "[4/4] B, seed 1: test accuracy 50.0%, recorded" in out
    assert err == ""
    for name, rows in expected.items():
        assert [without_times(row) for row in rows_of(f"joined/{name}")] == [without_times(row) for row in rows]
    assert Path("joined/results.md").read_text() == Path("whole/results.md").read_text()


def without_times(row: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in row.items() if name != "wall_seconds"}


@pytest.mark.usefixtures("no_plots")
def test_what_is_not_recorded_is_trained_and_what_is_finished_here_is_not_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite, runs = suite_of(run_of("A"), run_of("B"), run_of("C"))
    assert compare(suite, runs, Path("out"), 1, FAKE, "the command", ["A"]) == 0
    record("part", *(Outcome(run, replace(RESULT, test_accuracy=0.9), "trained") for run in runs[:2]))
    assert compare(suite, runs, Path("out"), 1, FAKE, "the command", ["C"], read_folder(Path("part"))) == 0
    found = {row["label"]: row["test_accuracy"] for row in rows_of("out/results.csv")}
    assert found == {"A": "0.5", "B": "0.9", "C": "0.5"}
    assert trained(runs) == ["A, seed 0", "C, seed 0"]
    assert "not in the suite" not in capsys.readouterr().err


SUITE: dict[str, Any] = {
    "title": "Two on the digits",
    "overrides": {
        "trainer": {"max_rounds": 2, "clients_per_round": 2, "accelerator": "cpu"},
        "model.init_args.network": {"class_path": "MLP", "init_args": {"hidden": [4]}},
        "data": {"num_clients": 4, "num_labels": 20, "max_train_images": 120, "max_test_images": 40},
    },
    "groups": [
        {
            "title": "G",
            "entries": [
                {"label": "Labels alone", "config": "supervised_digits.yaml", "role": "bound"},
                {"label": "SemiFL", "config": "semifl_digits.yaml"},
            ],
        }
    ],
}


@pytest.mark.usefixtures("no_plots")
def test_a_suite_is_trained_in_two_parts_and_joined(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedCommand)
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    for label in ("Labels alone", "SemiFL"):
        assert main(["compare", "suite.yaml", "--only", f"[{label}]", "--output", f"part {label}"]) == 0
    (labels,) = {row["label"] for row in rows_of("part SemiFL/pseudo_labels.csv")}
    assert labels == "SemiFL"
    capfd.readouterr()
    parts = "[part Labels alone, part SemiFL]"
    assert main(["compare", "suite.yaml", "--recorded", parts, "--only", "[]", "--output", "all"]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"\[2/2\] SemiFL, seed 0: test accuracy .*%, recorded", out)
    assert "recorded with other settings" not in err
    assert rows_of("all/results.csv") == rows_of("part Labels alone/results.csv") + rows_of("part SemiFL/results.csv")
    assert rows_of("all/pseudo_labels.csv") == rows_of("part SemiFL/pseudo_labels.csv")
    assert not Path("all/runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "[SemFL]"], "suite.yaml: --only: the suite has no entry 'SemFL'; did you mean SemiFL?"),
        (["--only", "[x]"], "suite.yaml: --only: the suite has no entry 'x'; it has Labels alone, SemiFL"),
        (["--recorded", "[nowhere]"], "nowhere has no results.csv: give the --output of a comparison that has ended"),
        (["--only", "SemiFL"], "--only: 'SemiFL' is no list; give one such as [SemiFL]"),
        (["--recorded", "part"], "--recorded: 'part' is no list; give one such as [part]"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    with pytest.raises(SystemExit):
        raise SystemExit(main(["compare", "suite.yaml", *options]))
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()
