"""The command ``tune``: measures settings in processes of their own, and prints the options of the fastest."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedssl.cli.entry import main
from lightning_fedssl.cli.lightning_cli import _fit_command
from lightning_fedssl.models import CNN
from lightning_fedssl.trainer import tuning
from lightning_fedssl.trainer.tuning import LeftOutError, Row, Setting, Steps, TuningReport, settings_to_try, stacked
from tests.test_semi_sfl import toy_semi_sfl
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer

PLAIN = Setting(1, 1, False, "32-true")
MIXED = Setting(1, 1, True, "bf16-mixed")


@pytest.fixture(autouse=True)
def _computes_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same settings on every processor."""
    monkeypatch.setattr(tuning, "emulates_bfloat16", lambda: False)


@pytest.fixture
def two_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "settings_to_try", lambda *_: [PLAIN, Setting(2, 1, True, "bf16-mixed")])


def test_the_settings_are_plans_precisions_and_layouts() -> None:
    settings = settings_to_try(cores=4, clients=3)
    assert {(s.ranks, s.threads) for s in settings} == {(1, 1), (3, 1), (1, 4)}
    assert len(settings) == len(set(settings)) == 12
    assert len(settings_to_try(cores=1, clients=10)) == 4  # one core: nothing but precision and layout
    assert {s.precision for s in settings_to_try(1, 1, "64-true")} == {"64-true", "bf16-mixed"}


def test_a_round_is_estimated_by_hand() -> None:
    steps = Steps(client=0.1, server=0.2, client_steps=30, server_steps=10, all_images=False)
    assert steps.round_seconds(ranks=1) == pytest.approx(30 * 0.1 + 10 * 0.2)
    assert steps.round_seconds(ranks=3) == pytest.approx(30 * 0.1 / 3 + 10 * 0.2)  # each rank repeats the server's
    alone = Steps(client=0.1, server=float("nan"), client_steps=30, server_steps=0, all_images=False)
    assert alone.round_seconds(ranks=1) == pytest.approx(3.0)


def report(load: float = 0.0) -> TuningReport:
    times = {PLAIN: 0.4, Setting(2, 1, True, "32-true"): 0.3, MIXED: 0.1}
    rows = [Row(setting, Steps(seconds, 0.0, 10, 0, True)) for setting, seconds in times.items()]
    return TuningReport(rows, load, 2)


def test_the_report_names_the_fastest_exact_and_the_fastest_mixed_setting() -> None:
    text = str(report())
    options = "--trainer.devices 2 --trainer.clients_at_once 1 --trainer.channels_last true --trainer.precision 32-true"
    assert f"OMP_NUM_THREADS=1 lightning-fedssl fit --config FILE {options}\n" in text
    typed = ["tune", "--config", "my run.yaml", "--seconds", "5", "--json=false", "--model.threshold", "-1"]
    assert _fit_command(typed) == "lightning-fedssl fit --config 'my run.yaml' --model.threshold -1"
    assert "fastest with bfloat16 (1.50 times as fast)" in text  # 10 x 0.3 / 2 ranks against 10 x 0.1
    assert "threshold" in text
    assert "other programs" not in text
    assert "other programs are running (load 1.5 on 2 cores)" in str(report(load=1.5))


def test_a_slower_setting_in_bfloat16_is_not_recommended() -> None:
    slow = [replace(row, steps=replace(row.steps, client=0.6)) for row in report().rows if row.setting == MIXED]
    text = str(TuningReport([*report().rows[:2], *slow], 0.0, 2))
    assert "bfloat16 does not pay here: its fastest setting is 0.25 times as fast" in text
    assert "bf16-mixed" not in text.splitlines()[-1]


def test_a_setting_that_lacks_a_measurement_is_not_the_fastest() -> None:
    """Stacked clients without images have no step; and all exact settings may have died."""
    nothing = Row(Setting(1, 1, False, "32-true", 2), Steps(float("nan"), 0.0, 10, 0, True))
    found = TuningReport([*report().rows, nothing], 0.0, 2)
    assert found.fastest(mixed=False).setting.ranks == 2
    alone = TuningReport([row for row in report().rows if row.setting == MIXED], 0.0, 2)
    assert "fastest with bfloat16:\n" in str(alone)
    assert list(alone.as_dict()) == ["rows", "left_out", "load", "cores", "fastest_bf16"]


def test_the_fastest_settings_are_tried_with_clients_stacked() -> None:
    rows = report().rows
    assert list(stacked(rows, clients=10)) == [  # 0.3 s shared by two ranks; bfloat16 on one
        Setting(2, 1, True, "32-true", clients_at_once=5),
        Setting(1, 1, True, "bf16-mixed", clients_at_once=10),
    ]
    assert [setting.clients_at_once for setting in stacked(rows, clients=3)] == [2, 3]  # two ranks: stacks of 2 and 1
    eight = [replace(row, setting=replace(row.setting, ranks=8)) for row in rows]
    settings = list(stacked(eight, clients=10))  # stacks of 2, which occupy five ranks
    assert {(setting.ranks, setting.clients_at_once) for setting in settings} == {(5, 2)}
    assert [setting.clients_at_once for setting in stacked(rows, clients=2)] == [2]  # one client a rank is no stack


def test_stacked_steps_are_measured_for_each_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "settings_to_try", lambda *_: [PLAIN])
    alone, together = toy_trainer(tmp_path).tune(toy_semifl(threshold=1.0), ToyData(), seconds=0.1).rows
    assert together.setting == replace(PLAIN, clients_at_once=3)
    assert together.steps.client_steps == alone.steps.client_steps
    assert 0 < together.steps.client < 10


def test_clients_that_cannot_be_stacked_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "settings_to_try", lambda *_: [PLAIN])
    not_elementwise = partial(torch.optim.Adafactor, lr=0.01)
    found = toy_trainer(tmp_path).tune(toy_semifl(optimizer=not_elementwise), ToyData(), seconds=0.1)
    assert [row.setting for row in found.rows] == [PLAIN]
    ((setting, reason),) = found.left_out
    assert (setting.clients_at_once, reason.split(" is ")[0]) == (3, "the optimizer Adafactor")
    assert f"left out: {setting.options()}: {reason}" in str(found)


class Choosy(nn.Module):
    """A network that trains in 32 bits alone, and whose weights of five dimensions cannot have the channels last."""

    def __init__(self, num_classes: int, in_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
        self.unused = nn.Conv3d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("this network needs 32 bits")
        logits: torch.Tensor = self.layers(x)
        return logits


def test_settings_that_the_trainer_refuses_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a rank that ends while another one waits for it."""
    refused = [Setting(2, 1, False, "bf16-mixed"), Setting(1, 1, True, "32-true")]
    monkeypatch.setattr(tuning, "settings_to_try", lambda *_: [*refused, PLAIN])
    found = toy_trainer(tmp_path).tune(toy_semifl(network=Choosy, threshold=1.0), ToyData(), seconds=0.1)
    assert [row.setting.clients_at_once for row in found.rows] == [1, 3]
    assert [setting for setting, _ in found.left_out] == refused
    assert found.left_out[0][1] == "this network needs 32 bits"
    assert "rank 4" in found.left_out[1][1]
    assert found.as_dict()["left_out"][0]["reason"] == "this network needs 32 bits"


def test_clients_with_large_networks_are_not_stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "settings_to_try", lambda *_: [PLAIN])
    weights = sum(p.nbytes for p in CNN(num_classes=3, in_shape=(1, 8, 8), width=4, norm="static_batch").parameters())
    tried = []
    for most in (3 * weights - 1, 3 * weights):
        monkeypatch.setattr(tuning, "LARGEST_STACK", most)
        found = toy_trainer(tmp_path).tune(toy_semifl(threshold=1.0), ToyData(), seconds=0.1)
        tried.append([row.setting.clients_at_once for row in found.rows])
    assert tried == [[1], [1, 3]]


def test_a_clock_counts_the_steps_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = tuning._Clock(seconds=5.0, together=2)

    def one_step(clock: tuning._Clock) -> None:
        for _ in range(2):
            clock.client_batch_ended(0)

    assert clock.measure(one_step) == pytest.approx((6.0 - 1.0) / 4)  # two steps of two clients after the first


def test_real_steps_are_measured_and_the_model_is_not_changed(tmp_path: Path, two_settings: None) -> None:
    algorithm, trainer = toy_semifl(threshold=1.0), toy_trainer(tmp_path)
    algorithm.configure_model()
    before = {name: t.clone() for name, t in algorithm.state_dict().items()}
    found = trainer.tune(algorithm, ToyData(), seconds=0.1)
    assert [row.setting.ranks for row in found.rows] == [1, 2, 1, 2]
    for row in found.rows:
        assert 0 < row.steps.client < 10
        assert 0 < row.steps.server < 10
        assert row.steps.all_images  # no image has confidence 1, so the threshold was lowered in the measurement
        assert row.steps.client_steps == 3 * 5  # three clients, (120 - 24) / 4 images in batches of 5
        assert row.steps.server_steps == 2 * 3  # two epochs of 12 labels in batches of 5
    assert algorithm.threshold == 1.0
    assert_same(dict(algorithm.state_dict()), before)
    assert not list(tmp_path.iterdir())


class Fails(nn.Module):
    """A network that refuses to be built."""

    def __init__(self, **_: Any) -> None:
        raise ValueError("model.network: no such size")


def test_the_threads_of_the_caller_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that die make no step, which is an error."""

    def dies(*arguments: Any) -> Steps:
        raise LeftOutError(tuning._NO_ANSWER)

    monkeypatch.setattr(tuning, "_measure", dies)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="no setting made a step"):
            toy_trainer(tmp_path).tune(toy_semifl(), ToyData())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_of_the_configuration_is_reported_once(tmp_path: Path, two_settings: None) -> None:
    with pytest.raises(ValueError, match=r"^model.network: no such size$"):
        toy_trainer(tmp_path).tune(toy_semifl(network=Fails), ToyData(), seconds=0.1)


class Dies(nn.Sequential):
    """A network that ends its process in the forward pass, as an illegal instruction does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)


def test_a_setting_whose_process_dies_is_left_out(tmp_path: Path, two_settings: None) -> None:
    with pytest.raises(ValueError, match="no setting made a step"):
        toy_trainer(tmp_path).tune(toy_semifl(network=Dies), ToyData(), seconds=0.1)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="clients that train alone, and those of SemiSFL train with the server"):
        toy_trainer(tmp_path).tune(toy_semi_sfl(), ToyData())


def test_the_command_prints_the_options(
    tmp_path: Path, two_settings: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--model",
        "SemiFL",
        "--model.network",
        "MLP",
        "--data.num_labels",
        "50",
        "--trainer.accelerator",
        "cpu",
    ]
    assert main(["tune", *arguments, "--seconds", "0.1", "--json", "true"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fastest"].endswith("--trainer.precision 32-true")
    assert found["fastest_bf16"].endswith("--trainer.precision bf16-mixed")
    assert [row["clients_at_once"] for row in found["rows"]] == [1, 1, 10, 5]
    assert not list(tmp_path.iterdir())
