"""The whole command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fedssl.cli.compare import read_suite, resolve, split_options
from lightning_fedssl.cli.entry import main
from lightning_fedssl.comparison.command import compare
from lightning_fedssl.comparison.suite import Suite, SuiteGroup
from lightning_fedssl.data import Dirichlet
from tests.comparison.helpers import FAKE, run_of
from tests.comparison.test_plan import TINY

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRIES = [
    {"label": "Labels alone", "config": "supervised_digits.yaml", "role": "bound"},
    {"label": "SemiFL", "config": "semifl_digits.yaml"},
]
GROUPS = [{"title": "Labels at the server", "entries": ENTRIES}]
SUITE: dict[str, Any] = {"title": "On digits", "seeds": [0, 1], "target": 0.9, "overrides": TINY, "groups": GROUPS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds ``suite.yaml``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    return tmp_path


def changed(*place: object, to: object) -> dict[str, Any]:
    """The suite with one value changed."""
    suite: Any = json.loads(json.dumps(SUITE))
    target = suite
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = to
    return dict(suite)


ENTRY = ("groups", 0, "entries", 1)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (changed("titel", to="x"), ["titel"]),
        (changed(*ENTRY, "role", to="methd"), ["methd"]),
        (changed(*ENTRY, "config", to="semifl_digit.yaml"), ["semifl_digit.yaml", "semifl_digits.yaml"]),
        (changed(*ENTRY, "overrides", to={"trainer.max_round": 1}), ["SemiFL", "max_round"]),
        (changed(*ENTRY, "overrides", to={"trainer.logger": False}), ["SemiFL: trainer.logger"]),
        (changed(*ENTRY, "overrides", to={"seed_everything": 1}), ["SemiFL", "seed_everything", "give seeds"]),
        (changed(*ENTRY, "overrides", to={"data.validation": 0.2}), ["data.validation is 0.1 and 0.2"]),
    ],
)
def test_what_is_wrong_with_a_suite_is_reported_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], content: dict[str, Any], named: list[str]
) -> None:
    Path("suite.yaml").write_text(yaml.safe_dump(content))
    message = failure(capsys, "suite.yaml")
    assert all(part in message for part in named), message
    assert not list(Path().rglob("log.txt"))


FULL = {
    "data.partition": {"class_path": "lightning_fedssl.data.Dirichlet", "init_args": {"alpha": 0.5}},
    "trainer.callbacks": [{"class_path": "lightning_fedssl.callbacks.CollapseDetector"}],
    "model.init_args.network": {"class_path": "lightning_fedssl.models.MLP", "init_args": {"hidden": [8]}},
    "model": {"init_args": {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.002}}}},
}


@pytest.mark.parametrize("place", [("overrides",), ("groups", 0, "overrides"), (*ENTRY, "overrides")])
def test_overrides_name_classes_by_full_import_paths(place: tuple[object, ...]) -> None:
    Path("suite.yaml").write_text(yaml.safe_dump(changed(*place, to=FULL)))
    suite, _ = read_suite(["suite.yaml", "--seeds", "[5]"])
    assert suite.seeds == [5]
    group, entry = suite.groups[0], suite.entries[1]
    found = resolve(entry, [suite.overrides, group.overrides, entry.overrides])
    assert isinstance(found.datamodule.partition, Dirichlet)
    assert found.config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.002
    assert found.config["model"]["init_args"]["network"]["init_args"]["hidden"] == [8]
    assert found.config["trainer"]["callbacks"][0]["class_path"].endswith("CollapseDetector")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["suite.yaml", "--overrides.data.num_labels", "3"], "keys of the suite's file"),
        ([], "no suite is given"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["suite.yaml", "--only", "[SemFL]"], "the suite has no entry 'SemFL'"),
        (["suite.yaml", "--trainer.default_root_dir", "x"], "give --output"),
    ],
)
def test_a_bad_option_is_reported(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert named in failure(capsys, *arguments)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that must fail prints on standard error."""
    try:
        code: object = main(["compare", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2)
    return capsys.readouterr().err


def test_options_of_runs_are_separated_from_those_of_the_command() -> None:
    given = ["a.yaml", "--trainer.max_rounds", "3", "--jobs=2", "--model.server_lr", "-1", "--seeds", "[0]"]
    assert split_options(given) == (
        ["a.yaml", "--jobs=2", "--seeds", "[0]"], ["--trainer.max_rounds", "3", "--model.server_lr", "-1"]
    )  # fmt: skip


def test_what_all_entries_read_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """In each call."""
    rows = [f"{i},{i * 7 % 5},{'ab'[i % 2]}" for i in range(100)]
    Path("t.csv").write_text("\n".join(["id,x,label", *rows]))
    table = ["Table", "--data.dataset.csv_file", "t.csv", "--data.dataset.label_column", "label"]
    options = ["--model.network", "MLP", "--data.weak", "GaussianNoise", "--data.strong", "FeatureMask"]
    for count in (1, 2):
        assert main(["compare", "suite.yaml", "--only", "[]", *options, "--data.dataset", *table]) == 0
        assert caplog.text.count("id: 100 different values") == count


def test_a_method_without_a_test_accuracy_is_compared_by_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    runs = [run_of("A"), run_of("B", tested="test/odd,test/loss")]
    suite = Suite("T", [SuiteGroup("G", [run.entry for run in runs])], [0])
    assert compare(suite, runs, Path("out"), 1, FAKE, "compare t.yaml") == 0
    assert "B, seed 0: its method logs no test/accuracy" in capfd.readouterr().out
    with Path("out/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["status"], row["test_accuracy"], row["best_accuracy"]) for row in rows] == [
        ("A", "finished", "0.5", "0.3"), ("B", "finished", "", "0.3"),
    ]  # fmt: skip
    assert "G,B,,,,30.0," in Path("out/summary.csv").read_text()


def test_compare_trains_reports_and_does_not_repeat(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "suite.yaml", "--seeds", "[3]", "--trainer.max_rounds", "1"]
    assert main([*command, "--only", "[SemiFL]"]) == 0
    assert "[1/1] SemiFL, seed 3: test accuracy" in capfd.readouterr().out
    assert main([*command, "--jobs", "2"]) == 0
    output = capfd.readouterr().out
    assert "[2/2]" in output
    assert output.count(", cached") == 1
    out = folder / "runs" / "compare" / "suite"
    with (out / "results.csv").open(newline="") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    assert rows["SemiFL"]["partition"] == rows["Labels alone"]["partition"]
    for row in rows.values():
        run = next(out.glob(f"runs/*/{row['run']}"))
        saved = json.loads(next(run.rglob("partition.json")).read_text())
        assert saved["hash"].startswith(row["partition"])
        assert saved["seed"] == 3
    assert int(rows["SemiFL"]["bytes"]) > 0
    page = (out / "report.html").read_text()
    assert "Labels at the server: SemiFL, test" in page
    assert "Keys in which entries differ" in page
    assert main([*command, "--only", "[]"]) == 0
    assert len(list(out.rglob("metrics.csv"))) == 2
    assert {str(path.parent) for path in out.rglob("events*")} == {
        str(out / "tensorboard" / name / "seed_3") for name in ("semifl", "labels_alone")
    }
