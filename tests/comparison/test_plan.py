"""What a run is known by, and that runs of a seed begin alike."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedssl import __version__
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.cli.compare import resolve
from lightning_fedssl.comparison import plan as plan_module
from lightning_fedssl.comparison.plan import Run, check_alike, hash_of, initial_weights, partition_key
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.models import CNN
from lightning_fedssl.task import Classification, Segmentation, Task
from tests.comparison.helpers import run_of

CODE_VERSION = plan_module.code_version
TINY: dict[str, Any] = {
    "trainer": {"max_rounds": 2, "clients_per_round": 2, "accelerator": "cpu"},
    "model": {"init_args": {"network": {"class_path": "MLP", "init_args": {"hidden": [4]}}}},
    "data": {"num_clients": 4, "num_labels": 20, "max_train_images": 120, "max_test_images": 40},
}
"""Laid over a configuration for digits it makes a run of a second."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setattr(plan_module, "code_version", lambda: "1+abc")


def plan_of(*options: str, seeds: tuple[int, ...] = (0,), **overrides: Any) -> list[Run]:
    """The runs of labels alone and SemiFL on the digits; the overrides are SemiFL's."""
    entries = [SuiteEntry("Alone", "supervised_digits.yaml", "bound")]
    entries += [SuiteEntry("SemiFL", "semifl_digits.yaml", overrides=overrides)]
    suite = Suite("T", [SuiteGroup("G", entries)], [*seeds], overrides=TINY)
    return plan_module.plan(suite, lambda entry, given: resolve(entry, given, options), Path("runs"))


def names(runs: list[Run]) -> list[str]:
    return [str(run.folder) for run in runs]


def test_runs_of_a_seed_share_partition_and_initial_weights_and_other_seeds_do_not() -> None:
    runs = plan_of(seeds=(0, 1))
    assert [(run.seed, run.entry.label) for run in runs] == [(0, "Alone"), (0, "SemiFL"), (1, "Alone"), (1, "SemiFL")]
    assert (runs[0].partition, runs[0].weights) == (runs[1].partition, runs[1].weights)
    assert runs[0].partition != runs[2].partition == runs[3].partition
    assert hash_of(runs[0].weights) != hash_of(runs[2].weights)
    assert len(set(names(runs))) == 4
    assert os.environ["PL_GLOBAL_SEED"] == "1"


@pytest.mark.parametrize("key", ["data.label_location=clients", "trainer.clients_per_round=5"])
def test_data_that_a_method_cannot_train_on_are_refused_before_the_first_run(key: str) -> None:
    with pytest.raises(ValueError, match=f"(Alone|SemiFL): .*{key.partition('=')[0]}"):
        plan_of(f"--{key}")


def test_what_changes_a_run_s_numbers_changes_its_name_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    base = names(plan_of())
    assert names(plan_of("--data.root=elsewhere", "--trainer.enable_progress_bar=false")) == base
    assert names(plan_of("--seed_everything=5")) == base
    for option in ("--trainer.max_rounds=3", "--data.client_batch_size=4"):
        assert set(names(plan_of(option))).isdisjoint(base)
    one = names(plan_of(model={"init_args": {"threshold": 0.5}}))
    assert [a == b for a, b in zip(one, base, strict=True)] == [True, False]
    monkeypatch.setattr(plan_module, "code_version", lambda: "1+abd")
    assert set(names(plan_of())).isdisjoint(base)


def test_other_samples_in_the_same_file_make_another_run() -> None:
    options = ("--data.dataset=own.npz", "--data.weak=none", "--data.strong=none", "--data.max_train_images=null")
    labels, found = np.arange(40) % 2, []
    for shift in (0.0, 0.0, 1.0):
        x = np.linspace(shift, 1, 160, dtype=np.float32).reshape(40, 1, 2, 2)
        np.savez("own.npz", train=x, train_labels=labels, test=x, test_labels=labels)
        found.append(names(plan_of(*options)))
    assert found[0] == found[1]
    assert set(found[2]).isdisjoint(found[0])


def test_code_is_known_by_its_version_and_in_a_checkout_by_its_commit() -> None:
    git = ["git", "-C", str(Path(plan_module.__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout[:8]
    suffix = rf"\+{commit}(-dirty)?" if commit else ""
    assert re.fullmatch(rf"{re.escape(__version__)}{suffix}", CODE_VERSION())


def test_buffers_of_a_file_are_part_of_the_initial_weights() -> None:
    network = CNN(width=2, norm="batch", num_classes=3, in_shape=(1, 8, 8))
    make = partial(FedAvg, network=partial(CNN, width=2, norm="batch"), num_classes=3, in_shape=(1, 8, 8))
    assert initial_weights(make()).keys() == dict(network.named_parameters()).keys()
    found = []
    for mean in (1.0, 2.0):
        network.get_buffer("norms.0.running_mean").fill_(mean)
        torch.save(network.state_dict(), "weights.pt")
        found.append(initial_weights(make(init_from="weights.pt")))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"norms.0.running_mean"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"partition": "q"}, "the partitions differ though the settings of data are the same"),
        ({"weights": "2"}, "the initial weights differ though the network is the same"),
        ({"data": {"validation": 0.2}}, r"evaluated on different data: data\.validation is None and 0\.2"),
        ({"partition": "q", "data": {"num_clients": 9}}, r"different partitions: data\.num_clients is None and 9"),
    ],
)
def test_runs_that_begin_differently_are_refused(other: dict[str, Any], message: str) -> None:
    check_alike([run_of("A"), run_of("B"), run_of("C")])
    with pytest.raises(ValueError, match=f"G: A and B \\(seed 0\\).*{message}"):
        check_alike([run_of("A"), run_of("B", **other)])


def test_other_folders_of_images_are_other_data_and_other_folders_of_a_named_data_set_are_not() -> None:
    photos = {"dataset": "image_folder", "image_size": 8}
    check_alike([run_of("A", data={"dataset": "mnist", "root": "a"}), run_of("B", data={"dataset": "mnist"})])
    with pytest.raises(ValueError, match=r"evaluated on different data: data\.root is a and b"):
        check_alike([run_of("A", data={**photos, "root": "a"}), run_of("B", data={**photos, "root": "b"})])


def test_a_bound_may_have_a_partition_of_its_own() -> None:
    bound = SuiteEntry("B", "a.yaml", "bound")
    check_alike([run_of("A"), run_of(bound, partition="q", data={"num_clients": 9})])


def test_a_partition_with_empty_arguments_is_the_one_without() -> None:
    assert partition_key({"partition": {"class_path": "Iid"}, "num_labels": 5}) == partition_key(
        {"partition": {"class_path": "Iid", "init_args": {}}, "num_labels": 5}
    )


def test_keys_in_which_entries_differ_are_named_once_with_each_value() -> None:
    def run(label: str, norm: str, cohort: int, **own: Any) -> Run:
        made = run_of(label)
        network = {"class_path": "CNN", "init_args": {"norm": norm}}
        made.resolved.config.update(
            model={"class_path": label, "init_args": {"network": network, **own}},
            trainer={"clients_per_round": cohort, "default_root_dir": label},
        )
        return made

    runs = [run("A", "group", 5, threshold=0.9), run("B", "static", 10), run("C", "static", 10)]

    assert plan_module.differing_keys(runs) == [
        "model.network.norm: group (A); static (B, C)",
        "trainer.clients_per_round: 5 (A); 10 (B, C)",
    ]


@pytest.mark.parametrize(
    ("target", "second", "message"),
    [
        (None, Segmentation(), "A and B have different metrics .*Classification and Segmentation"),
        (1.5, Classification(), "target: 1.5 is above the largest accuracy"),
    ],
)
def test_a_suite_has_one_metric(target: float | None, second: Task, message: str) -> None:
    suite = Suite("T", [SuiteGroup("G", [SuiteEntry("A", "a.yaml"), SuiteEntry("B", "b.yaml")])], target=target)
    with pytest.raises(ValueError, match=message):
        plan_module.check_metric(suite, {"A": Classification(), "B": second})
