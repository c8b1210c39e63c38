"""docs/results_tables.md says what the CSVs in benchmarks/results say; missing and stopped runs show."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/build_results.py as a module."""
    spec = importlib.util.spec_from_file_location("build_results", DOCS / "build_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_results", module)  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_csvs_agree(script: ModuleType) -> None:
    assert (DOCS / "results_tables.md").read_text(encoding="utf-8") == script.page()


def test_a_number_that_changes_in_a_csv_is_noticed(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build_results.py", "--check"])
    assert script.main() == 0
    shutil.copytree(script.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.md"))
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    path = tmp_path / "results" / "compare_digits" / "results.csv"
    path.write_text(path.read_text().replace("0.9042253521", "0.5042253521"))
    assert script.main() == 1
    assert "results_tables.md differs from the CSVs" in capsys.readouterr().out


def test_missing_and_stopped_runs_show(script: ModuleType) -> None:
    """(80 + 90) / 2 = 85, half their distance is 5; a run without accuracy or that was stopped is not averaged."""
    row = {"status": "finished", "rounds": "9", "seed": "0", "accuracy": "80"}
    assert script.accuracy([]) == "not run"
    assert script.accuracy([row]) == "80.0 (1)"
    assert script.accuracy([row, {**row, "accuracy": "90", "seed": "1"}]) == "85.0 ± 5.0 (2)"
    stopped = {**row, "status": "stopped", "seed": "3", "rounds": "4"}
    assert script.accuracy([row, stopped]) == "80.0 (1); seed 3: stopped after 4"
    assert script.accuracy([stopped]) == "seed 3: stopped after 4"
    assert script.accuracy([{"accuracy": "0.5", "seed": "0"}], scale=100) == "50.0 (1)"


def test_a_cell_is_met_up_to_two_points_below_the_paper(script: ModuleType) -> None:
    assert script.met("80.0 ± 1.0 (3)", 82.0) == "yes"
    assert script.met("80.0 (1)", 82.1) == "no, 2.1 below"
    assert script.met("90.0 (1)", 82.1) == "yes"
    assert script.met("not run", 82.1) == script.met("80.0 (1)", None) == ""
