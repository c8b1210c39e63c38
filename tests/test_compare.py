from __future__ import annotations

import csv
import importlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from matplotlib.figure import Figure

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.cli import main
from lightning_fedssl.cli.compare import parser, resolve, split_options, with_bar
from lightning_fedssl.comparison import code_version, plots, report
from lightning_fedssl.comparison.code_watch import CodeWatch
from lightning_fedssl.comparison.command import compare, line_of
from lightning_fedssl.comparison.execute import Executor, Outcome, _lock
from lightning_fedssl.comparison.plan import Run, Start, check_alike, initial_weights, plan
from lightning_fedssl.comparison.records import rounds, unfinished
from lightning_fedssl.comparison.results import (
    Point,
    Result,
    first_reaching,
    median_to_target,
    paired_difference,
    result_from,
    spread,
)
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.models import CNN
from tests.fake_runs import FAKE, run_of
from tests.forked_command import ForkedCommand

ROOT = Path(__file__).resolve().parent.parent

TINY: dict[str, Any] = {
    "trainer": {"max_rounds": 2, "clients_per_round": 2, "accelerator": "cpu"},
    "model": {"init_args": {"network": {"class_path": "MLP", "init_args": {"hidden": [4]}}}},
    "data": {"num_clients": 4, "num_labels": 20, "max_train_images": 120, "max_test_images": 40},
}
"""Laid over a configuration for digits it makes a run of a second."""

SUITE: dict[str, Any] = {
    "title": "Two on the digits",
    "seeds": [0, 1],
    "target": 0.9,
    "overrides": TINY,
    "groups": [
        {
            "title": "Labels at the server",
            "entries": [
                {"label": "Labels alone", "config": "supervised_digits.yaml", "role": "bound"},
                {"label": "SemiFL", "config": "semifl_digits.yaml"},
            ],
        }
    ],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds ``suite.yaml``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("suite.yaml").write_text(yaml.safe_dump(SUITE))
    return tmp_path


# The suite and its messages.


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
    ("content", "message"),
    [
        (changed("titel", to="x"), "suite.yaml: there is no key titel; did you mean title?"),
        (changed("title", to=""), "suite.yaml: title: missing; say what is compared"),
        (changed("seeds", to=[]), "suite.yaml: seeds: empty; give at least one, such as [0]"),
        (changed("seeds", to=[1, 1]), "suite.yaml: seeds: 1 is listed twice; give every seed once"),
        (
            changed(*ENTRY, "overrides", to={"trainer.logger": False}),
            "suite.yaml: SemiFL: trainer.logger is False: the tables are made from the metrics.csv of whole runs",
        ),
        (
            changed(*ENTRY, "overrides", to={"trainer.fast_dev_run": True}),
            "suite.yaml: SemiFL: trainer.fast_dev_run is True: the tables are made from the metrics.csv of whole runs",
        ),
        (changed("groups", to=2 * SUITE["groups"]), "suite.yaml: groups: two groups have the title '"),
        (changed("seeds", to=[-1]), "suite.yaml: seeds: -1 is below 0; seeds are whole numbers from 0"),
        (changed("seeds", to=["a"]), "suite.yaml: seeds: expected a whole number, got a"),
        (changed("target", to=90), "suite.yaml: target: 90.0 is not an accuracy; give a number above 0, at most 1"),
        (changed("groups", to=[]), "suite.yaml: groups: missing; give a list of groups, each with a title and entries"),
        (changed("groups", 0, "title", to=""), "suite.yaml: groups, no. 1: title is missing; say what its entries"),
        (changed("groups", 0, "entries", to=[]), "suite.yaml: groups, no. 1 (Labels at the server): entries are"),
        (changed(*ENTRY, "role", to="methd"), "suite.yaml: groups.entries.role: expected one of method, bound, got"),
        (changed(*ENTRY, "rol", to="bound"), "suite.yaml: groups.entries: SuiteEntry takes no rol; did you mean role?"),
        (changed(*ENTRY, "label", to="Labels alone"), "suite.yaml: groups: two entries have the label 'Labels alone'"),
        (changed(*ENTRY, "label", to=""), "suite.yaml: groups, no. 1 (Labels at the server), entry no. 2: label is"),
        (changed(*ENTRY, "config", to=""), "suite.yaml: groups, no. 1 (Labels at the server), SemiFL: config is"),
        (
            changed(*ENTRY, "config", to="semifl_digit.yaml"),
            "suite.yaml: SemiFL: semifl_digit.yaml: there is no such file; did you mean semifl_digits.yaml?",
        ),
        (
            changed(*ENTRY, "overrides", to={"trainer.max_round": 1}),
            "suite.yaml: SemiFL: there is no key trainer.max_round; did you mean trainer.max_rounds?",
        ),
        (
            changed(*ENTRY, "overrides", to={"model": {"init_args": {"treshold": 1}}}),
            "suite.yaml: SemiFL: model: SemiFL takes no treshold; did you mean threshold?",
        ),
        (
            changed(*ENTRY, "overrides", to={"model.init_args.threshold": 3}),
            "suite.yaml: SemiFL: model.threshold is 3.0: give a probability between 0 and 1",
        ),
        (
            changed(*ENTRY, "overrides", to={"data.validation": 0.2}),
            "suite.yaml: Labels at the server: Labels alone and SemiFL (seed 0) are evaluated on different data: "
            "data.validation is 0.1 and 0.2; set the same value in the group's overrides",
        ),
    ],
)
def test_what_is_wrong_with_a_suite_is_reported_in_one_line_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], content: dict[str, Any], message: str
) -> None:
    Path("suite.yaml").write_text(yaml.safe_dump(content))
    assert failure(capsys, "suite.yaml").startswith(message)
    assert not list(Path().rglob("log.txt"))


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that must fail."""
    try:
        code: object = main(["compare", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no suite is given: lightning-fedssl compare digits.yaml, or a file of your own; lightning-fedssl suites"),
        (["nowhere.yaml"], "nowhere.yaml: there is no such file; lightning-fedssl suites lists"),
        (["suite.yaml", "--jobs", "0"], "--jobs is 0: give 1 or more"),
        (["suite.yaml", "--job", "1"], "there is no option --job; did you mean --jobs?"),
        (["suite.yaml", "--trainer.max_round", "1"], "suite.yaml: Labels alone: there is no key trainer.max_round;"),
    ],
)
def test_a_bad_option_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert failure(capsys, *arguments).startswith(message)


def test_the_help_says_that_a_shortened_run_is_no_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])
    example, _, note = capsys.readouterr().out.partition("--trainer.max_rounds 2")
    assert example
    assert "A shortened run is a trial and no comparison" in note


def test_options_of_runs_are_separated_from_those_of_the_command() -> None:
    given = ["a.yaml", "--trainer.max_rounds", "3", "--jobs=2", "--data.root=x", "--seeds", "[0]", "--model", "SemiFL"]
    own, passed_on = split_options(given)
    assert own == ["--suite", "a.yaml", "--jobs=2", "--seeds", "[0]"]
    assert passed_on == ["--trainer.max_rounds", "3", "--data.root=x", "--model", "SemiFL"]


def test_an_option_before_the_suite_wins_over_it(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("title: Two\nseeds: [0, 1]\ngroups: []\n")
    own, _ = split_options(["--seeds", "[7]", str(tmp_path / "two.yaml"), "--model.server_lr", "-1"])
    assert parser().parse_args(own).seeds == [7]


def test_a_negative_number_is_a_value() -> None:
    given = ["a.yaml", "--model.server_lr", "-1", "--model.x", "-.5", "--jobs", "-2"]
    assert split_options(given) == (["--suite", "a.yaml", "--jobs", "-2"], given[1:5])


def test_the_suite_may_stand_after_an_option_with_a_value_of_its_own() -> None:
    assert split_options(["--jobs=2", "a.yaml"])[0] == ["--jobs=2", "--suite", "a.yaml"]
    assert split_options(["--data.root=x", "a.yaml"]) == (["--suite", "a.yaml"], ["--data.root=x"])
    assert split_options(["--jobs", "2", "a.yaml"])[0] == ["--jobs", "2", "--suite", "a.yaml"]
    assert split_options(["--data.root", "x", "a.yaml"]) == (["--suite", "a.yaml"], ["--data.root", "x"])


# The plan: what a run is known by, and that runs of a seed begin alike.


def plan_of(content: dict[str, Any], options: tuple[str, ...] = (), any_code: bool = False) -> list[Run]:
    groups = [
        SuiteGroup(**{**group, "entries": [SuiteEntry(**entry) for entry in group["entries"]]})
        for group in content["groups"]
    ]
    suite = Suite(**{**content, "groups": groups})
    return plan(suite, lambda entry, overrides: resolve(entry, overrides, options), Path("runs"), any_code)


def names(runs: list[Run]) -> list[str]:
    return [str(run.folder) for run in runs]


def test_runs_of_a_seed_share_partition_and_initial_weights_and_other_seeds_do_not() -> None:
    runs = plan_of(SUITE)
    assert [(run.seed, run.entry.label) for run in runs] == [
        (0, "Labels alone"), (0, "SemiFL"), (1, "Labels alone"), (1, "SemiFL")
    ]  # fmt: skip
    assert runs[0].start == runs[1].start
    assert runs[2].start == runs[3].start
    assert runs[0].start.partition != runs[2].start.partition
    assert runs[0].start.weights_hash != runs[2].start.weights_hash
    assert len(set(names(runs))) == 4


def test_buffers_of_a_file_are_part_of_the_initial_weights() -> None:
    """Without a file they follow from code and seed, so that the names of such runs stay as they were."""
    network = CNN(width=2, norm="batch", num_classes=3, in_shape=(1, 8, 8))
    make = partial(FedAvg, network=partial(CNN, width=2, norm="batch"), num_classes=3, in_shape=(1, 8, 8))
    assert initial_weights(make()).keys() == dict(network.named_parameters()).keys()
    found = []
    for mean in (1.0, 2.0):
        network.get_buffer("norms.0.running_mean").fill_(mean)
        torch.save(network.state_dict(), "weights.pt")
        found.append(initial_weights(make(init_from="weights.pt")))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"norms.0.running_mean"}


def test_reading_many_configurations_logs_no_line_of_lightning_for_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolve(SuiteEntry("A", "supervised_digits.yaml"), [TINY, {"trainer.precision": "bf16-mixed"}])
    assert "Precision" not in caplog.text
    with caplog.at_level(logging.INFO):
        logging.getLogger("lightning.pytorch.utilities.rank_zero").info("later")
    assert "later" in caplog.text


def test_the_progress_of_planning_is_shown_on_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert list(with_bar([1, 2], "reading")) == [1, 2]
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # counts as a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert list(with_bar([1, 2], "reading")) == [1, 2]
    assert "reading" in capsys.readouterr().out


def test_the_environment_is_left_without_a_seed() -> None:
    os.environ["PL_GLOBAL_SEED"] = "7"
    plan_of(SUITE)
    assert os.environ["PL_GLOBAL_SEED"] == "0"  # the configurations' own, as after any command


def test_what_changes_a_run_s_numbers_changes_its_name_and_nothing_else_does() -> None:
    base = names(plan_of(SUITE))
    assert names(plan_of(SUITE)) == base
    same = ("--data.root=elsewhere", "--trainer.enable_progress_bar=false", "--trainer.default_root_dir=x")
    assert names(plan_of(SUITE, same)) == base
    assert names(plan_of(SUITE, ("--seed_everything=5",))) == base
    for option in ("--trainer.max_rounds=3", "--data.client_batch_size=4", "--model.gradient_clip_norm=9"):
        assert set(names(plan_of(SUITE, (option,)))).isdisjoint(base)
    one = names(plan_of(changed(*ENTRY, "overrides", to={"model.init_args.threshold": 0.5})))
    assert [a == b for a, b in zip(one, base, strict=True)] == [True, False, True, False]


def test_other_data_of_the_user_make_another_run() -> None:
    """The partition is the same, as it depends on the labels alone."""
    arrays = {"class_path": "Arrays", "init_args": {"path": "data.npz"}}
    data = {"dataset": arrays, "num_clients": 4, "num_labels": 6, "weak": "none", "strong": "none"}
    labels, found = np.arange(60) % 3, []
    for value in (1, 1, 2):
        samples = np.full((60, 4), value, dtype=np.float32)
        np.savez("data.npz", train=samples, train_labels=labels, test=samples, test_labels=labels)
        found.append(plan_of(changed("overrides", "data", to=data)))
    assert names(found[0]) == names(found[1])
    assert set(names(found[0])).isdisjoint(names(found[2]))
    assert found[0][0].start.partition == found[2][0].start.partition


def test_images_of_another_folder_make_another_run_and_no_group(folder: Path) -> None:
    from PIL import Image

    for grey, root in enumerate(("one", "two")):
        for place in ("train/x", "train/y", "test/x", "test/y"):
            (folder / root / place).mkdir(parents=True)
            for name in "ab":
                Image.new("L", (8, 8), 100 * grey).save(folder / root / place / f"{name}.png")
    data = {"dataset": "image_folder", "image_size": 8, "num_clients": 1, "num_labels": 2, "validation": 0}
    suite = changed("overrides", "data", to={**data, "root": "one", "weak": "none", "strong": "none"})
    suite["overrides"]["trainer"]["clients_per_round"] = 1
    assert set(names(plan_of(suite))).isdisjoint(names(plan_of(suite, ("--data.root=two",))))
    suite["groups"][0]["entries"][1]["overrides"] = {"data.root": "two"}
    with pytest.raises(ValueError, match=r"Labels alone and SemiFL .* read different data; give them the same"):
        plan_of(suite)


def test_a_method_on_another_partition_needs_a_group_of_its_own() -> None:
    other = {"label": "Skewed", "config": "semifl_digits.yaml", "overrides": {"data.partition": "Dirichlet"}}
    suite = changed("groups", 0, "entries", to=[SUITE["groups"][0]["entries"][1], other])
    with pytest.raises(
        ValueError, match=r"SemiFL and Skewed \(seed 0\) have different partitions: data.partition is Iid"
    ):
        plan_of(suite)
    other["role"] = "bound"
    assert len(plan_of(suite)) == 4


def test_differing_partitions_or_weights_under_the_same_settings_are_refused() -> None:
    check_alike([run_of("A"), run_of("B"), run_of("C", Start("p", {"w": "1", "v": "2"}))])
    with pytest.raises(ValueError, match="the partitions differ though the settings of data are the same"):
        check_alike([run_of("A"), run_of("B", Start("q", {"w": "1"}))])
    with pytest.raises(ValueError, match="the initial weights differ though the network is the same"):
        check_alike([run_of("A"), run_of("B", Start("p", {"w": "2"}))])


def test_code_of_a_method_and_what_it_imports_are_part_of_its_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = code_version.code_version
    fed_shvr, semifl = ({"class_path": f"lightning_fedssl.{name}"} for name in ("FedSHVR", "SemiFL"))
    before = {"fed_shvr": version(fed_shvr), "semifl": version(semifl)}
    assert before["fed_shvr"] != before["semifl"]
    real = code_version._file_of
    edited = tmp_path / "labeled_unlabeled.py"
    source = real("lightning_fedssl.algorithms.common.labeled_unlabeled").read_text()

    def file_of(module: str) -> Path:
        return edited if module.endswith("labeled_unlabeled") else real(module)

    monkeypatch.setattr(code_version, "_file_of", file_of)
    edited.write_text(source + "\n# a comment\n")
    code_version._hash.cache_clear()
    assert version(fed_shvr) == before["fed_shvr"]
    edited.write_text(source + "\nx = 1\n")
    code_version._hash.cache_clear()
    assert version(fed_shvr) != before["fed_shvr"]
    assert version(semifl) == before["semifl"]


MY_CODE = {
    "my_losses.py": "def extra(): return 1\n",
    "my_method.py": "import lightning_fedssl\nfrom my_losses import extra\n\n\n"
    "class MyMethod(lightning_fedssl.FixMatch):\n    class Inner:\n        pass\n",
    "my_views.py": "def quiet(x, keys): return x\n\n\ndef net(**kwargs): return None\n",
    "my_data.py": "import lightning_fedssl\n\n\nclass MyData(lightning_fedssl.FederatedDataModule):\n    pass\n",
    "other.py": "x = 1\n",
}


@pytest.mark.parametrize("changed_file", [*MY_CODE, "fixmatch.py"])
def test_all_code_of_a_user_s_own_that_a_run_uses_is_part_of_its_name(
    changed_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that are named, what the named classes import, their bases, and the class of the data."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in MY_CODE.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    modules = {name: importlib.import_module(name.removesuffix(".py")) for name in MY_CODE}
    config = {
        "model": {"class_path": "my_method.MyMethod", "init_args": {"network": "my_views.net"}},
        "data": {"weak": "my_views.quiet", "root": "no.such", "strong": {"class_path": "my_method.MyMethod.Inner"}},
    }

    real = code_version._file_of

    def version() -> str:
        real.cache_clear()
        code_version._hash.cache_clear()
        code_version._import_statements.cache_clear()
        return code_version.code_version(config, modules["my_data.py"].MyData)

    before = version()
    assert version() == before
    if changed_file == "fixmatch.py":
        copy = tmp_path / "copy_of_fixmatch.py"
        copy.write_text(real("lightning_fedssl.algorithms.fixmatch").read_text() + "\nx = 1\n")

        def file_of(module: str) -> Path:
            return copy if module == "lightning_fedssl.algorithms.fixmatch" else real(module)

        monkeypatch.setattr(code_version, "_file_of", file_of)
    else:
        with (tmp_path / changed_file).open("a") as file:
            file.write("y = 2\n")
    assert (version() != before) == (changed_file != "other.py")
    for name in MY_CODE:
        sys.modules.pop(name.removesuffix(".py"))


def test_signs_of_latex_and_markdown_in_labels_are_escaped() -> None:
    assert report._latex_text(r"a_b^2 \ {x} ~ 5 % ± 1") == (
        r"a\_b\^{}2 \textbackslash{} \{x\} \textasciitilde{} 5 \% $\pm$ 1"
    )
    assert report._cells(["a|b", "c"]) == r"| a\|b | c |"


def test_finished_runs_of_other_code_are_taken_if_asked_for(folder: Path) -> None:
    suite = changed("seeds", to=[0])
    base = plan_of(suite)
    assert [run.folder for run in plan_of(suite, any_code=True)] == [run.folder for run in base]
    other = base[1].folder.with_name(base[1].folder.name.rpartition("_")[0] + "_12345678")
    version = other / "lightning_logs" / "version_0"
    version.mkdir(parents=True)
    (version / "metrics.csv").write_text("step,test/accuracy,test/loss\n1,,\n")
    assert plan_of(suite, any_code=True)[1].folder == base[1].folder
    (version / "metrics.csv").write_text("step,test/accuracy,test/loss\n1,0.5,1\n")
    taken = plan_of(suite, any_code=True)
    assert (taken[0].folder, taken[1].folder, taken[1].code) == (base[0].folder, other, "12345678")
    assert plan_of(suite)[1].folder == base[1].folder


# Execution, with a stand-in for fit.


def execute(runs: list[Run], jobs: int = 1) -> list[Outcome]:
    return Executor(FAKE, jobs, lambda outcome: None).execute(runs)


def with_present_code(run: Run) -> Run:
    return replace(run, code=code_version.code_version(run.resolved.config))


def attempts(run: Run) -> list[str]:
    return (run.folder / "log.txt").read_text().splitlines()


def test_runs_are_trained_once_with_their_seed_and_configuration() -> None:
    runs = [run_of("A"), run_of("A", seed=4), run_of("B", rounds=1)]
    outcomes = execute(runs, jobs=2)
    assert sorted((o.run.name, o.how) for o in outcomes) == [
        ("A, seed 0", "trained"), ("A, seed 4", "trained"), ("B, seed 0", "trained")
    ]  # fmt: skip
    assert attempts(runs[1]) == ["seed 4 from round 1"]
    assert [o.result.rounds for o in execute(runs) if o.result] == [3, 3, 1]
    assert {o.how for o in execute(runs)} == {"cached"}
    assert all(len(attempts(run)) == 1 for run in runs)


def test_a_run_that_starts_after_a_change_of_the_code_has_the_new_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code changes while the first run trains."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_code.py").write_text("def net(): return None\n")
    importlib.import_module("my_code")
    planned = [run_of(label) for label in "ABC"]
    for run in planned:
        run.resolved.config["model"]["class_path"] = "my_code.net"
    runs = list(map(with_present_code, planned))
    lines: list[str] = []

    def ended(outcome: Outcome) -> None:
        (tmp_path / "my_code.py").write_text("x = (\n")  # being edited

    watch = CodeWatch(lines.append)
    a, b, c = (o.run for o in Executor(FAKE, 1, ended, current=watch.current).execute(runs))
    sys.modules.pop("my_code")
    assert a is runs[0]
    assert b.code == c.code != runs[1].code
    assert b.folder == runs[1].folder.with_name(f"seed_0_{b.code[:8]}")
    assert len(rounds(b.folder)) == 3
    assert not rounds(runs[1].folder)
    (line,) = lines
    assert line.startswith("the code has changed since the comparison began: runs that start now are stored under its")


def test_a_change_of_the_code_before_the_first_run_starts_is_noticed() -> None:
    """Planning reads the data of every run, which may take minutes."""
    lines: list[str] = []
    run = replace(run_of(), code="of the old code")
    assert CodeWatch(lines.append).current(run).code != run.code
    assert len(lines) == 1


@pytest.mark.parametrize("content", [b"x = '\xff'", b"x = 1\0", b"x = ("])
def test_code_that_is_no_code_has_a_hash(tmp_path: Path, content: bytes) -> None:
    """A file may be read while an editor writes it; that is no reason to stop the runs that train."""
    path = tmp_path / "my_code.py"
    path.write_bytes(b"x = 1\n")
    before = code_version._of_file(path)
    path.write_bytes(content)
    assert code_version._of_file(path) != before
    path.unlink()
    assert code_version._of_file(path) == "removed"


def test_a_file_that_vanishes_while_it_is_read_counts_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_code.py"
    path.write_text("x = 1\n")
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    path.unlink()
    assert code_version._of_file(path) == "removed"


def test_no_code_is_compared_for_a_run_that_another_process_trains() -> None:
    """It would be compared five times a second, for each of these runs."""
    taken, free = run_of("A"), run_of("B")
    lock = _lock(taken.folder)
    assert lock is not None
    asked: list[Run] = []

    def current(run: Run) -> Run:
        asked.append(run)
        return run

    def ended(outcome: Outcome) -> None:
        if outcome.run is free:
            os.close(lock)

    Executor(FAKE, 2, ended, current=current).execute([taken, free])
    assert asked == [free, taken]


def test_a_failing_run_does_not_stop_the_others_and_is_tried_again() -> None:
    runs = [run_of("A", fails=True), run_of("B")]
    outcomes = {o.run.entry.label: o for o in execute(runs)}
    assert (outcomes["A"].how, outcomes["B"].how) == ("failed", "trained")
    assert outcomes["A"].result is None
    assert "runs/a/seed_0_x/log.txt" in line_of(outcomes["A"])
    assert execute([run_of("A")])[0].how == "trained"
    assert attempts(runs[0]) == ["seed 0 from round 1"] * 2


def test_at_most_so_many_processes_run_at_a_time() -> None:
    seen: list[int] = []
    runs = [run_of(label, rounds=2, sleep=0.2) for label in "ABCD"]
    Executor(FAKE, 2, lambda outcome: None, lambda training: seen.append(len(training))).execute(runs)
    assert max(seen) == 2


PARENT = """
import sys
from lightning_fedssl.comparison.execute import Executor, terminable
from tests.fake_runs import FAKE, run_of
try:
    with terminable():
        Executor(FAKE, 1, lambda outcome: print(outcome.how, flush=True)).execute([run_of("A", rounds=12, sleep=0.25)])
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_parent() -> subprocess.Popen[str]:
    """``compare``'s part that starts processes, as a process of its own; it has trained a few rounds."""
    # A shell starts background jobs with SIGINT ignored, which children inherit: the test's own would be lost.
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_until(lambda: len(rounds(run_of("A").folder)) >= 2)
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_after_a_kill_the_run_left_behind_is_waited_for_and_not_trained_twice() -> None:
    parent = start_parent()
    parent.kill()
    parent.wait()
    outcomes = execute([run_of("A", rounds=12)])
    assert [(o.how, o.result and o.result.rounds) for o in outcomes] == [("cached", 12)]
    assert attempts(run_of("A")) == ["seed 0 from round 1"]


def test_a_killed_run_resumes_from_its_last_checkpoint() -> None:
    parent = start_parent()
    child = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True, check=True)
    parent.kill()
    parent.wait()
    os.kill(int(child.stdout), signal.SIGKILL)
    done = len(rounds(run_of("A").folder))
    (outcome,) = execute([run_of("A", rounds=12)])
    assert outcome.how == "resumed"
    assert outcome.result is not None
    assert [point.round for point in outcome.result.curve] == list(range(1, 13))
    first, second = attempts(run_of("A"))
    assert first == "seed 0 from round 1"
    assert 1 < done <= int(second.rpartition(" ")[2]) <= done + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_lets_the_current_round_finish_and_the_same_command_resumes(number: signal.Signals) -> None:
    parent = start_parent()
    parent.send_signal(number)
    output, _ = parent.communicate()
    assert (parent.returncode, output.split()) == (130, ["stopped"])
    assert 2 <= len(rounds(run_of("A").folder)) < 12
    assert execute([run_of("A", rounds=12)])[0].how == "resumed"


def test_an_error_stops_the_processes_that_are_training() -> None:
    """After a full disk no process trains on, and the same command resumes."""
    run = run_of("A", rounds=60, sleep=0.05)

    def fill_the_disk(training: list[Run]) -> None:
        if rounds(run.folder):
            raise OSError(28, "No space left on device")

    executor = Executor(FAKE, 1, lambda outcome: None, fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        executor.execute([run])
    assert [outcome.how for outcome in executor.outcomes] == ["stopped"]
    assert len(rounds(run.folder)) < 60
    assert _lock(run.folder) is not None


def test_a_run_that_lost_rounds_of_its_metrics_begins_again() -> None:
    run = run_of("A")
    execute([run])
    file = run.folder / "lightning_logs" / "version_0" / "metrics.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], *lines[2:], ""]))
    assert unfinished(rounds(run.folder)) == "rounds are missing"
    assert execute([run])[0].how == "trained"
    assert attempts(run) == ["seed 0 from round 1"] * 2


# Numbers.


def test_rows_of_resumed_runs_are_merged_and_torn_ones_left_out(tmp_path: Path) -> None:
    first, second = (tmp_path / "lightning_logs" / name for name in ("version_9", "version_10"))
    for folder, text in ((first, "step,a,b\n1,0.5,\n2,0.25,1\n3,0."), (second, "step,a,c\n2,0.75,4\n3,x,\n")):
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(text)
    assert rounds(tmp_path) == [
        {"step": 1, "a": 0.5}, {"step": 2, "a": 0.75, "b": 1, "c": 4}
    ]  # fmt: skip
    assert rounds(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    "torn", [b"2,0.9", b"2,0.95,0.", b'2,"0.', b"2,\xff\xfe\n", b"\0\0\0", b"nan,1,1\n", b"1e999,1,1\n"]
)
def test_a_torn_row_is_left_out(tmp_path: Path, torn: bytes) -> None:
    """A number may be cut and still be one."""
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_bytes(b"step,test/accuracy,val/accuracy\r\n1,0.5,0.5\r\n" + torn)
    assert rounds(tmp_path) == [{"step": 1, "test/accuracy": 0.5, "val/accuracy": 0.5}]


def test_a_result_adds_up_bytes_and_simulated_seconds_and_keeps_evaluated_rounds() -> None:
    """Bytes 15, 1 and 2 per round, 0.5 s and 0.25 s; rounds 2 and 3 have a validation."""
    rows = [
        {"step": 1, "communication/upload_bytes": 10, "communication/download_bytes": 5, "time/round_s": 0.5},
        {"step": 2, "communication/upload_bytes": 1, "val/accuracy": 0.75, "time/round_s": 0.25},
        {"step": 3, "communication/download_bytes": 2, "val/accuracy": 0.5, "test/accuracy": 0.6, "test/loss": 1.5},
    ]
    result = result_from(rows)
    assert [(p.round, p.accuracy, p.bytes) for p in result.curve] == [(2, 0.75, 16), (3, 0.5, 18)]
    assert (result.test_accuracy, result.test_loss, result.rounds, result.bytes) == (0.6, 1.5, 3, 18)
    assert (result.wall_seconds, result.best) == (0.75, result.curve[0])
    assert math.isnan(result.seconds)
    simulated = result_from([{**row, "system/seconds": 2.0 * row["step"]} for row in rows])
    assert [p.seconds for p in simulated.curve] == [4.0, 6.0]
    assert simulated.seconds == 6.0


def test_a_method_without_a_test_loss_has_a_result(tmp_path: Path) -> None:
    result = result_from([{"step": 1, "test/accuracy": 0.5}])
    assert (result.test_accuracy, math.isnan(result.test_loss)) == (0.5, True)
    run = run_of("A")
    report.write(tmp_path, Suite("T", [run.group], [0]), [Outcome(run, result, "trained")], "the command", {})
    with (tmp_path / "results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["status"], row["test_accuracy"], row["test_loss"]) == ("finished", "0.5", "")


def test_a_method_without_a_test_accuracy_is_compared_by_the_rest(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is trained once, its cells are empty, and a line says what its method has to return."""
    runs = list(map(with_present_code, (run_of("A"), run_of("B", tested="test/odd,test/loss"))))
    suite = Suite("T", [SuiteGroup("G", [run.entry for run in runs])], [0])
    for how in ("trained", "cached"):
        assert compare(suite, runs, Path("out"), 1, FAKE, "compare t.yaml") == 0
        out, err = capfd.readouterr()
        assert "[1/2] A, seed 0: test accuracy 50.0%, " in out
        assert re.search(rf"B, seed 0: no test accuracy, {how}", out)
        assert err == "B logs no test/accuracy: its cells are empty; let the method's test_step return the logits\n"
    with Path("out/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["status"], row["test_accuracy"], row["best_accuracy"]) for row in rows] == [
        ("A", "finished", "0.5", "0.3"), ("B", "finished", "", "0.3"),
    ]  # fmt: skip
    assert "| B |  |  |  | 30.0 |" in Path("out/results.md").read_text()
    assert Path("out/final.png").is_file()


def test_unfinished_runs_are_recognised_by_what_is_missing() -> None:
    row = {"step": 1.0, "test/accuracy": 0.5}
    assert unfinished([row]) == ""
    assert unfinished([]) == "nothing was logged"
    assert unfinished([{"step": 1.0}]) == "there is no test"
    assert unfinished([{"step": 1.0}], whole=False) == ""
    assert unfinished([{**row, "step": 2.0}]) == "rounds are missing"


def test_means_spreads_and_paired_differences_by_hand() -> None:
    """Deviations -0.2, 0, 0.2: variance 0.08 / 2. Seeds 0 and 1 differ by 0.1 and 0.3: mean 0.2, variance 0.02."""
    three = spread([0.5, 0.7, 0.9])
    assert [three.mean, three.std, three.count] == pytest.approx([0.7, 0.2, 3])
    assert math.isnan(spread([0.5]).std)
    difference = paired_difference({0: 0.5, 1: 0.8, 2: 0.9}, {1: 0.5, 0: 0.4, 3: 0.0})
    assert difference is not None
    assert [difference.mean, difference.std, difference.count] == pytest.approx([0.2, 0.02**0.5, 2])
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


CURVE = [Point(1, 0.5, 10, 1.0), Point(2, 0.9, 20, 2.0), Point(3, 0.8, 30, 3.0), Point(4, 0.95, 40, 4.0)]


def test_a_target_is_reached_at_the_first_round_that_is_not_below_it() -> None:
    assert first_reaching(CURVE, 0.9) is CURVE[1]
    assert first_reaching(CURVE, 0.91) is CURVE[3]
    assert first_reaching(CURVE, 0.96) is None
    assert first_reaching([], 0.1) is None


def test_the_median_cost_counts_runs_that_did_not_get_there_as_the_worst() -> None:
    assert median_to_target([3, 1, 2]) == 2
    assert median_to_target([3, None, 2]) == 3
    assert median_to_target([3, None, None]) is None
    assert median_to_target([1, 2, None, None]) is None
    assert median_to_target([]) is None


# Tables and plots.


def outcome_of(run: Run, accuracy: float, curve: list[Point]) -> Outcome:
    return Outcome(run, Result(accuracy, 0.1, 4, curve, 40e6, 4.0, 2.0), "trained", 1.0)


def comparison() -> tuple[Suite, list[Outcome]]:
    """A bound and two methods over two seeds; one run failed."""
    bound, good, bad = SuiteEntry("Bound", "b.yaml", "bound"), SuiteEntry("Good", "g.yaml"), SuiteEntry("Bad", "h.yaml")
    group = SuiteGroup("G", [bad, bound, good], note="A note.")
    suite = Suite("T", [group], [0, 1], 0.9)
    low = [replace(point, accuracy=0.1) for point in CURVE]
    settings = [
        (bound, 0, 0.5, low),
        (bound, 1, 0.7, low),
        (good, 0, 0.8, CURVE),
        (good, 1, 0.9, low),
        (bad, 0, 0.4, low),
    ]
    outcomes = [
        outcome_of(replace(run_of(entry.label, seed=seed), entry=entry, group=group), accuracy, curve)
        for entry, seed, accuracy, curve in settings
    ]
    lost = replace(run_of("Bad", seed=1), entry=bad, group=group)
    return suite, [*outcomes, Outcome(lost, None, "failed")]


def test_the_table_holds_means_differences_and_costs_to_the_target() -> None:
    suite, outcomes = comparison()
    lines = report.markdown(suite, outcomes, "the command", {"a plot": "a.png"})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert rows == [
        [
            "entry",
            "test",
            "worst seed",
            "difference",
            "best",
            "rounds to 90%",
            "MB to 90%",
            "s to 90%",
            "rounds",
            "MB",
            "seeds",
        ],
        ["*Bound* (bound)", "60.0 ± 14.1", "50.0", "", "10.0 ± 0.0", "not reached (0 of 2)", "", "", "4", "40", "2"],
        ["Good", "85.0 ± 7.1", "80.0", "+25.0 ± 7.1", "52.5 ± 60.1", "not reached (1 of 2)", "", "", "4", "40", "2"],
        ["Bad", "40.0", "40.0", "-10.0", "10.0", "not reached (0 of 1)", "", "", "4", "40", "1 of 2"],
    ]
    assert "**Below Bound: Bad.**" in lines
    assert "A note." in lines
    assert "![a plot](a.png)" in lines
    assert lines[-1] == "`the command`"
    assert max(map(len, lines)) <= 120


def test_only_the_seeds_of_both_say_which_method_is_below_the_bound() -> None:
    """Bad has one seed, with 55 %: more than the bound with this seed, 50 %, and less than its mean, 60 %."""
    suite, outcomes = comparison()
    better = [
        replace(o, result=replace(o.result, test_accuracy=0.55)) if o.run.entry.label == "Bad" and o.result else o
        for o in outcomes
    ]
    lines = report.markdown(suite, better)
    assert any(line.startswith("| Bad | 55.0 | 55.0 | +5.0 |") for line in lines)
    assert not any("Below" in line for line in lines)


def test_costs_to_a_target_that_every_seed_reached_are_medians() -> None:
    suite, outcomes = comparison()
    good = [
        replace(o, result=replace(o.result, curve=CURVE)) for o in outcomes if o.run.entry.label == "Good" and o.result
    ]
    line = report.lines_of(suite.groups[0], good)[0:1] + report.lines_of(suite.groups[0], good)[1:]
    table = report.group_table(suite.groups[0], line, 0.9)
    row = next(row for row in table if row.startswith("| Good"))
    assert [cell.strip() for cell in row.split("|")][6:9] == ["2", "2e-05", "2"]
    assert any(line.startswith("| Bad | no run ended |") for line in table)


def test_the_csv_files_hold_a_row_a_run_and_a_row_a_round(tmp_path: Path) -> None:
    suite, outcomes = comparison()
    report.write(tmp_path, suite, outcomes, "the command", {})
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["seed"], row["status"]) for row in rows] == [
        ("Bad", "0", "finished"), ("Bad", "1", "failed"), ("Bound", "0", "finished"), ("Bound", "1", "finished"),
        ("Good", "0", "finished"), ("Good", "1", "finished"),
    ]  # fmt: skip
    assert (rows[4]["test_accuracy"], rows[4]["rounds_to_target"], rows[4]["bytes_to_target"]) == ("0.8", "2", "20")
    assert rows[5]["rounds_to_target"] == rows[1]["test_accuracy"] == ""
    with (tmp_path / "curves.csv").open(newline="") as file:
        curves = list(csv.DictReader(file))
    assert len(curves) == 5 * len(CURVE)
    assert [(row["label"], row["seed"]) for row in curves[:: len(CURVE)]] == [
        ("Bad", "0"), ("Bound", "0"), ("Bound", "1"), ("Good", "0"), ("Good", "1"),
    ]  # fmt: skip
    good = curves[3 * len(CURVE)]
    assert good == {"label": "Good", "seed": "0", "round": "1", "accuracy": "0.5", "bytes": "10", "seconds": "1"}


def test_plots_are_written_where_there_is_something_to_show(tmp_path: Path) -> None:
    suite, outcomes = comparison()
    groups = {group.title: report.lines_of(group, outcomes) for group in suite.groups}
    files = plots.draw(tmp_path, suite.title, groups, suite.target)
    assert sorted(files.values()) == ["bytes.png", "final.png", "rounds.png", "time.png"]
    for file in files.values():
        starts = [(tmp_path / file).with_suffix(suffix).read_bytes()[:5] for suffix in plots.FORMATS]
        assert starts == [b"\x89PNG\r", b"<?xml", b"%PDF-"]
    silent = [replace(o, result=replace(o.result, curve=[])) for o in outcomes if o.result]
    groups = {group.title: report.lines_of(group, silent) for group in suite.groups}
    assert list(plots.draw(tmp_path, suite.title, groups, None).values()) == ["final.png"]


def test_long_labels_and_dollar_signs_leave_room_for_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axes of every plot are at least half as wide as the figure, or as its column."""
    suite, outcomes = comparison()
    for number, entry in enumerate(suite.entries):
        entry.label = f"{number}: costs $a_$^$b, " + "a method with a rather long name, " * 4
    widths: list[float] = []

    def note(figure: Any, path: Path, title: str, text: str) -> None:
        figure.canvas.draw()
        visible = [axes for axes in figure.axes if axes.get_visible()]
        columns = len({round(axes.get_position().x0, 2) for axes in visible})
        widths.extend(axes.get_position().width * columns for axes in visible)

    monkeypatch.setattr(plots, "_save", note)
    groups = {group.title: report.lines_of(group, outcomes) for group in suite.groups}
    plots.draw(tmp_path, suite.title, groups, suite.target)
    assert min(widths) > 0.5


def test_every_method_of_a_plot_looks_different_and_bounds_are_grey() -> None:
    suite, outcomes = comparison()
    (bound, *_) = report.lines_of(suite.groups[0], outcomes)
    methods = [report.Line(SuiteEntry(f"m{i}"), {}) for i in range(20)]
    looks = plots.colours_of([bound, *methods])
    assert len(set(looks.values())) == 21
    assert looks["Bound"][0] not in plots.PALETTE


def test_the_axis_begins_below_every_point_of_a_curve() -> None:
    suite, outcomes = comparison()
    lines = report.lines_of(suite.groups[0], outcomes)
    lowest = min(
        100 * p.accuracy for line in lines if not line.is_bound for r in line.results.values() for p in r.curve
    )
    assert plots._lowest(lines, plots.KINDS["rounds"]) < lowest


def test_the_latex_table_has_the_cells_of_the_markdown_table() -> None:
    suite, outcomes = comparison()
    text = report.latex(suite, outcomes)
    assert text.count("\\end{tabular}") == len(suite.groups)
    group = suite.groups[0]
    head, *rows = report.table_rows(group, report.lines_of(group, outcomes), suite.target)
    row = next(row for row in rows if row[0] == "Good")
    line = next(line for line in text if line.startswith("Good"))
    assert line.endswith(r" \\")
    assert len(line.split(" & ")) == len(head)
    assert row[2] in line


# The whole command.


def test_compare_trains_reports_and_does_not_repeat(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forked processes; ``tests/test_cli.py`` has a comparison that starts a fresh interpreter."""
    monkeypatch.setattr(subprocess, "Popen", ForkedCommand)
    command = ["compare", "suite.yaml", "--seeds", "[3]", "--trainer.max_rounds", "1", "--jobs", "2"]
    assert main(command) == 0
    output = capfd.readouterr().out
    assert "[2/2]" in output
    assert "SemiFL, seed 3: test accuracy" in output
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
    assert "| SemiFL | " in (out / "results.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.csv")}
    assert len(before) == 2
    assert main(command) == 0
    assert capfd.readouterr().out.count(", cached") == 2
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.csv")} == before


def test_a_plot_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the new plot is written leaves the former one, and nothing else."""

    def full(self: Figure, path: Path, **kwargs: Any) -> None:
        Path(path).write_text("half a plot")
        raise OSError(28, "No space left on device", str(path))

    folder = tmp_path / "plots"
    folder.mkdir()
    (folder / "final.png").write_text("the former plot")
    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        plots._save(Figure(), folder / "final.png", "A title", "A note.")
    assert (folder / "final.png").read_text() == "the former plot"
    assert [path.name for path in folder.iterdir()] == ["final.png"]


def test_a_table_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while the new table is written leaves the former one."""
    path = tmp_path / "results.csv"
    report._write_csv(path, [{"label": "a", "seed": 1}])
    assert path.read_text() == "label,seed\na,1\n"

    def full(self: Path, text: str, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report._write_csv(path, [{"label": "b", "seed": 2}])
    assert path.read_text() == "label,seed\na,1\n"


def test_a_group_that_has_no_curve_for_an_axis_has_an_empty_panel(tmp_path: Path) -> None:
    """A group with simulated time next to one without."""
    suite, outcomes = comparison()
    timed = {group.title: report.lines_of(group, outcomes) for group in suite.groups}
    untimed = [replace(point, seconds=float("nan")) for point in CURVE]
    entry = SuiteEntry("Untimed", "u.yaml")
    other = report.Line(entry, {0: Result(0.5, 0.1, 4, untimed, 40e6, float("nan"), 2.0)})
    plots.draw_curves(tmp_path / "time.png", "T", {**timed, "H": [other]}, "time", None)
    assert (tmp_path / "time.png").stat().st_size > 5000


@pytest.mark.parametrize("words", [2, 12])
def test_a_long_legend_leaves_the_panel_its_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, *rest: figures.append(figure))
    for entries in (2, 16):
        labels = [f"method {k}" + " variant" * words for k in range(entries)]
        of_entry = [SuiteEntry(label, "a.yaml") for label in labels]
        lines = [report.Line(entry, {0: Result(0.5, 0.1, 4, CURVE, 40e6, 4.0, 2.0)}) for entry in of_entry]
        plots.draw_curves(tmp_path / "rounds.png", "T", {"G": lines}, "rounds", None)
    heights = []
    for figure in figures:
        figure.canvas.draw()
        heights.append(figure.axes[0].get_window_extent().height)
    assert 0.9 < heights[1] / heights[0] < 1.35  # matplotlib 3.10 leaves more room than 3.11


def test_a_curve_of_one_round_is_a_visible_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, *rest: figures.append(figure))
    for curve in (CURVE[:1], CURVE):
        line = report.Line(SuiteEntry("A", "a.yaml"), {0: Result(0.5, 0.1, 4, curve, 40e6, 4.0, 2.0)})
        plots.draw_curves(tmp_path / "rounds.png", "T", {"G": [line]}, "rounds", None)
    markers = [figure.axes[0].lines[0].get_marker() for figure in figures]
    assert markers == ["o", "None"]
