"""The suites that come with the package: what they name exists, and groups compare like with like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_fedssl.cli.compare import read_suite, resolve
from lightning_fedssl.cli.lightning_cli import FederatedCLI
from lightning_fedssl.comparison.plan import EVALUATION, Resolved, partition_key, plan
from lightning_fedssl.comparison.suite import Suite, SuiteGroup
from lightning_fedssl.data import datasets
from lightning_fedssl.trainer import FederatedTrainer
from tests.configs.test_configs import BRIEF, SMALL_DATA, load_stand_in

FOLDER = Path(__file__).resolve().parent.parent.parent / "configs" / "suites"
SUITES = [path.stem for path in sorted(FOLDER.iterdir())]
DAILY = ("digits",)
"""The suites that make test reads whole; a suite has up to 40 configurations, each of which takes a second to read."""


@cache
def suite_of(name: str) -> Suite:
    return read_suite([f"{name}.yaml"])[0]


@cache
def groups_of(name: str) -> list[SuiteGroup]:
    """The groups of a suite, without those that differ from an earlier one in the values of a sweep alone."""
    kinds: dict[str, SuiteGroup] = {}
    for group in suite_of(name).groups:
        entries = [(str(entry.config), sorted(keys_of(entry.overrides))) for entry in group.entries]
        kinds.setdefault(str((entries, sorted(keys_of(group.overrides)))), group)
    return list(kinds.values())


def keys_of(overrides: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of overrides, with the classes that they name."""
    if isinstance(overrides, dict):
        for key, value in overrides.items():
            yield from keys_of(value, f"{prefix}.{key}")
    else:
        yield f"{prefix} {overrides}" if isinstance(overrides, str) else prefix


@cache
def resolved(name: str, label: str) -> Resolved:
    """The configuration of an entry in the last of a suite's kinds of groups that has one of this label."""
    suite = suite_of(name)
    group, entry = [(group, entry) for group in groups_of(name) for entry in group.entries if entry.label == label][-1]
    offline = {"data.backbone.init_args.weights": None} if "backbone" in suite.overrides.get("data", {}) else {}
    return resolve(entry, [suite.overrides, group.overrides, entry.overrides, offline])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):  # the classes of IMAGE-100 are folders
        for number in range(100):
            folder = tmp_path / "data" / "image100" / part / f"class{number:02}"
            folder.mkdir(parents=True)
            (folder / "0.png").touch()  # counted, not read


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in SUITES])
def test_groups_compare_like_with_like_and_labels_are_where_the_title_says(name: str) -> None:
    for group in groups_of(name):
        data = {entry.label: resolved(name, entry.label).config["data"] for entry in group.entries}
        methods = [data[entry.label] for entry in group.entries if entry.role == "method"]
        # What sites state of their classes changes no partition.
        assert len({partition_key(keys | {"class_shares": None}) for keys in methods}) == 1, group.title
        assert len({str([keys[key] for key in EVALUATION]) for keys in data.values()}) == 1, group.title
        place = "clients" if re.search(r"at (the|\d+) clients|pooled", group.title) else "server"
        assert {keys["label_location"] for keys in methods} == {place}, group.title


def test_the_ceiling_has_the_labelled_images_of_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    ceiling, method = (resolved("digits", label).datamodule for label in ("FixMatch on pooled images", "SemiFL"))
    for data in (ceiling, method):
        data.setup()
    assert torch.equal(ceiling.split.clients[0].labeled, method.split.server_labeled)
    everyone = torch.cat([method.split.server_labeled, method.unlabeled_pool()]).sort().values
    assert torch.equal(ceiling.unlabeled_pool(), everyone)


def test_the_digits_suite_can_be_run(tmp_path: Path) -> None:
    suite = suite_of("digits")
    one_seed = replace(suite, seeds=[0])
    runs = plan(one_seed, lambda entry, overrides: resolved("digits", entry.label), tmp_path)
    assert len({run.folder for run in runs}) == len(suite.entries)


ONE_CLIENT = ["--data.num_clients=1", "--trainer.clients_per_round=1"]
OF_ANOTHER_METHOD = {
    ("svhn_1000", "1000 labels alone, SVHNCNN"): ["--data.num_labels=20"],
    ("svhn_1000", "All labels at the clients (FedAvg, SVHNCNN)"): [],
    ("svhn_1000", "FedSwitch-style"): ["--data.num_labels=20"],
    ("svhn_1000", "SemiFL, SVHNCNN"): ["--data.num_labels=20", "--model.threshold=0"],
    ("svhn_1000", "FedMatch"): ["--data.num_labels=20"],
    ("fedrgd_tables", "FedRGD (ResNet-9, R = 0)"): ["--data.num_labels=20"],
    ("fedrgd_sweeps", "FixMatch on pooled images (CIFAR-10)"): ["--data.num_labels=20", *ONE_CLIENT],
}
"""Entries that change the method of their configuration, or the location of the labels; and what makes them quick."""


@pytest.mark.parametrize(("suite", "label"), OF_ANOTHER_METHOD)
def test_an_entry_that_changes_its_configuration_s_method_runs_one_round(
    suite: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # put back afterwards, whatever fit leaves there
    monkeypatch.setattr(datasets, "load", load_stand_in)
    file = tmp_path / "config.yaml"
    file.write_text(resolved(suite, label).text)
    small = [
        "--model.network.width=4", *(["--model.network.hidden=16"] if suite == "svhn_1000" else []),
        *SMALL_DATA, *OF_ANOTHER_METHOD[suite, label],
    ]  # fmt: skip
    cli = FederatedCLI(args=["fit", f"--config={file}", *BRIEF, *small])
    assert cast(FederatedTrainer, cli.trainer).round_index == 1
    assert all(torch.isfinite(weight).all() for weight in cli.model.server.parameters.values())
