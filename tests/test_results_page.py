"""The results pages say what the CSVs in benchmarks/results say; missing and stopped runs show."""

from __future__ import annotations

import importlib
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
HEAD = "label,seed,status,rounds,test_accuracy\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/build_results.py as a module."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("build_results")


@pytest.fixture
def judged(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Our result of a claim about these lines of a CSV, and whether it is met."""
    monkeypatch.setattr(importlib.import_module("measurements"), "RESULTS", tmp_path)

    def judge(lines: str, claim: dict[str, Any]) -> tuple[str, str]:
        (tmp_path / "a.csv").write_text(lines)
        found: tuple[str, str] = script.judged({"runs": {"csv": "a.csv", "where": {"label": "ours"}}, **claim})
        return found

    return judge


def test_the_pages_and_the_csvs_agree(script: ModuleType) -> None:
    assert {path: path.read_text(encoding="utf-8") for path in script.pages()} == script.pages()


def test_a_number_that_changes_in_a_csv_is_noticed(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["build_results.py", "--check"])
    assert script.main() == 0
    measurements = importlib.import_module("measurements")
    shutil.copytree(measurements.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.md"))
    monkeypatch.setattr(measurements, "RESULTS", tmp_path / "results")
    path = tmp_path / "results" / "compare_digits" / "results.csv"
    path.write_text(re.sub(r"(SemiFL,method,0,finished,\d+,)[\d.]+", r"\g<1>0.5", path.read_text()))
    assert script.main() == 1
    found = capsys.readouterr().out
    assert "results.md differs from the CSVs" in found
    assert "digits.md differs from the CSVs" in found
    assert "fed_shvr.md" not in found


def test_a_typed_number_in_a_table_is_noticed(script: ModuleType) -> None:
    """The script writes everything between the marks of a table."""
    text = (DOCS / "results" / "mnist.md").read_text(encoding="utf-8")
    typed = re.sub(r"\| 9\d\.\d ±", "| 99.9 ±", text, count=1)
    assert typed != text
    assert script.filled(typed) == text
    for path in (DOCS / "results").glob("*.md"):
        assert path.read_text(encoding="utf-8").count("<!-- table:") == path.read_text("utf-8").count("<!-- end -->")


def test_missing_and_stopped_runs_show(judged: Callable[..., tuple[str, str]]) -> None:
    """(80 + 90) / 2 = 85, and both are 5 from it: sqrt((25 + 25) / (2 - 1)) = 7.07."""
    claim = {"paper": 86.0, "seeds": 3, "setting": "small"}
    assert judged(HEAD, {**claim, "gpu_hours": 2}) == ("", "not run (2 GPU hours)")
    one = HEAD + "ours,0,finished,9,0.8\nother,0,finished,9,0.1\n"
    assert judged(one, claim) == ("80.0 (1 of 3; small)", "not met, 6.0 below")
    two = one + "ours,1,finished,9,0.9\n"
    assert judged(two, {**claim, "seeds": 2}) == ("85.0 ± 7.1 (2; small)", "met")
    stopped = two + "ours,2,stopped,4,0.7\n"
    assert judged(stopped, claim)[0] == "85.0 ± 7.1 (2 of 3; small); seed 2: stopped after 4 rounds"
    assert judged(HEAD + "ours,2,stopped,4,\n", claim) == ("seed 2: stopped after 4 rounds", "not run")


def test_a_file_that_nobody_has_written_is_not_run(script: ModuleType) -> None:
    claim = {"runs": {"csv": "no_such.csv", "where": {"label": "ours"}}, "paper": 1.0}
    assert script.judged(claim) == ("", "not run")


def test_a_number_is_met_up_to_two_points_below_the_paper(judged: Callable[..., tuple[str, str]]) -> None:
    row = HEAD + "ours,0,finished,9,0.8\n"
    assert judged(row, {"paper": 82.0})[1] == "met"
    assert judged(row, {"paper": 82.1})[1] == "not met, 2.1 below"
    assert judged(row, {"paper": 70})[1] == "met"
    assert judged(row, {"paper": 82.0, "smaller": True})[1] == "met (small)"
    assert judged(row, {"paper": 82.0, "withdrawn": "wrong"})[1] == "withdrawn: wrong"
    assert judged(row, {"paper": 82.0, "control": True, "smaller": True})[1] == "control"


def test_a_difference_is_met_if_every_seed_reaches_the_goal(judged: Callable[..., tuple[str, str]]) -> None:
    """Seed 0: 80 - 70 = 10, seed 1: 90 - 88 = 2; mean 6, and sqrt(16 + 16) = 5.66. Seed 2 has no counterpart."""
    rows = HEAD + "ours,0,finished,9,0.8\nours,1,finished,9,0.9\nours,2,finished,9,0.1\n"
    rows += "theirs,0,finished,9,0.7\ntheirs,1,finished,9,0.88\n"
    claim = {"paper": "above", "minus": {"label": "theirs"}}
    assert judged(rows, claim) == ("+6.0 ± 5.7 points (2)", "met")
    assert judged(rows, {**claim, "goal": 5}) == ("+6.0 ± 5.7 points (2)", "not met, 1 of 2 seeds")
    assert judged(rows, {"paper": "below", "minus": {"label": "nobody"}}) == ("", "not run")


def test_a_file_with_a_row_for_each_round_is_read_at_its_end(judged: Callable[..., tuple[str, str]]) -> None:
    rows = "label,seed,round,accuracy\nours,0,2,0.3\nours,0,4,0.5\nours,1,2,0.4\n"
    assert judged(rows, {"paper": 50.0, "rounds": 4}) == ("50.0 (1); seed 1: stopped after 2 rounds", "met")


def test_a_claim_names_columns_that_exist(judged: Callable[..., tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match=r"names the column width, but the CSV has label, seed"):
        judged(HEAD + "ours,0,finished,9,0.8\n", {"paper": 1.0, "where": {"width": 3}})


def test_every_claim_has_what_its_row_needs(script: ModuleType) -> None:
    papers = yaml.safe_load((DOCS / "claims.yaml").read_text(encoding="utf-8"))
    assert {"SemiFL", "FedRGD", "Fed-SHVR", "Semi-SFL", "FedMatch"} <= {paper["paper"] for paper in papers}
    for paper in papers:
        assert (DOCS / "results" / f"{paper['details']}.md").is_file()
        for claim in itertools.chain.from_iterable(map(script.cells_of, paper["claims"])):
            assert {"runs", "found", "gpu_hours"} & set(claim), claim["claim"]
            assert "found" in claim or claim["command"], claim["claim"]


def test_commands_name_files_that_exist() -> None:
    """A configuration, suite or script that a claim's command names is in the repository."""
    text = (DOCS / "claims.yaml").read_text(encoding="utf-8")
    names = {word.rpartition("/")[2] for word in re.findall(r"[\w/]+\.(?:yaml|py)\b", text)}
    known = {path.name for folder in ("configs", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.*")}
    assert len(names) > 20
    assert names - known == set()
