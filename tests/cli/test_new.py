"""The command ``new``: the files that it writes run, and pass the tests that it writes."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from lightning_fedssl.cli import main


def test_the_written_method_passes_the_written_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "OwnMatch", "--folder", "a folder"]) == 0
    files = ["a folder/own_match.py", "a folder/own_match.yaml", "a folder/test_own_match.py"]
    assert capsys.readouterr().out.splitlines() == [
        *(f"written: {file}" for file in files), "next: cd 'a folder' && lightning-fedssl fit --config own_match.yaml"
    ]  # fmt: skip
    monkeypatch.chdir("a folder")
    monkeypatch.syspath_prepend(".")
    tests = {name: test for name, test in vars(import_module("test_own_match")).items() if name.startswith("test_")}
    assert len(tests) == 3
    for name, test in tests.items():
        test(**{"tmp_path": tmp_path / name} if "tmp_path" in inspect.signature(test).parameters else {})
    assert main(["fit", "--config", "own_match.yaml", "--trainer.fast_dev_run", "true", "--trainer.devices", "1"]) == 0
    assert "after round 1: test accuracy" in capsys.readouterr().out


def test_the_configuration_of_a_new_method_is_that_of_the_baseline() -> None:
    """So that a suite of the two compares methods, not norms, cohorts or schedules."""
    root = Path(__file__).resolve().parents[2]
    own, baseline = (
        yaml.safe_load((root / file).read_text())
        for file in ("lightning_fedssl/cli/templates/my_method.yaml", "configs/fixmatch_digits.yaml")
    )
    assert own["model"].pop("class_path") == "my_method.MyMethod"
    assert own["model"]["init_args"].pop("threshold") == 0.95  # the baseline's default
    own["trainer"].pop("default_root_dir"), baseline["trainer"].pop("default_root_dir")
    assert own == {**baseline, "model": {"init_args": baseline["model"]["init_args"]}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my-method"], "'my-method' is not a name of a class: give letters and digits, the first a capital"),
        (["FixMatch"], "there is a method or a module fix_match of this name already: give another name"),
        (["Torch"], "there is a method or a module torch of this name already: give another name"),
        (["Import"], "'Import' would be the word 'import' of Python's own language: give another name"),
        (["Old"], "old.yaml is there already: give another name, or another --folder"),
    ],
)
def test_an_unusable_name_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").touch()
    assert main(["new", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
