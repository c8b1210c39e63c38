"""A second ``fit`` of a trainer and its callbacks gives the same as a first one."""

from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy, deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from examples.diagnostics.gradient_diversity import GradientDiversity
from examples.diagnostics.stage_losses import StageLosses
from examples.diagnostics.stop_at_equilibrium import StopAtEquilibrium
from lightning.pytorch.callbacks import Timer

from lightning_fedssl import callbacks
from lightning_fedssl.algorithms.common.cohort_slots import clone
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.schedules import Cosine
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.state import load_state
from lightning_fedssl.system import Device, SystemModel
from lightning_fedssl.trainer.evaluation import evaluate
from lightning_fedssl.trainer.setup import build_model
from tests.algorithms.helpers import adaptive_semi_sfl, toy_rgd, toy_semi_sfl, toy_shvr, uneven_clients
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import StopAfter, assert_equal


class Case(NamedTuple):
    """How a callback is made, and a method, data and a system that it works with."""

    make: Callable[[], FederatedCallback]
    method: Callable[[], Any] = toy_semifl
    data: Callable[[], Any] = partial(ToyData, max_train_images=72)
    system: SystemModel | None = None


CASES = {
    "ClientEvaluation": Case(callbacks.ClientEvaluation),
    "CollapseDetector": Case(callbacks.CollapseDetector),
    "CommunicationLedger": Case(callbacks.CommunicationLedger),
    "EMATeacher": Case(callbacks.EMATeacher, toy_semi_sfl),
    "FederatedCheckpoint": Case(callbacks.FederatedCheckpoint),
    "GlobalUpdateFrequency": Case(
        lambda: callbacks.GlobalUpdateFrequency(4, milestones=[2], window=1, rho_1=1e-9, rho_2=1e-8), adaptive_semi_sfl
    ),
    "LabelsAlone": Case(callbacks.LabelsAlone),
    "PseudoLabelQuality": Case(callbacks.PseudoLabelQuality),
    "RoundProgress": Case(callbacks.RoundProgress),
    "RunReport": Case(callbacks.RunReport),
    "RunResult": Case(callbacks.RunResult),
    "StaticBatchNorm": Case(lambda: callbacks.StaticBatchNorm("pooled")),
    "SystemClock": Case(callbacks.SystemClock, system=SystemModel([Device("a", 1.0)])),
}


EXAMPLES = (
    Case(GradientDiversity),
    Case(lambda: StageLosses(threshold=0.4)),
    Case(lambda: StopAtEquilibrium(1e9, window=2)),
)


class Recorder(FederatedCallback):
    """Records the scalars of every round, and interrupts a run after the first client of a round if it is asked to."""

    def __init__(self) -> None:
        self.interrupts_in = 0
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.rows: dict[int, dict[str, float]] = {}

    def on_client_end(self, trainer: Any, algorithm: Any, update: Any) -> None:
        if trainer.round_index == self.interrupts_in:
            raise KeyboardInterrupt

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.rows[trainer.round_index] = {k: v for k, v in metrics.items() if not k.startswith("time/")}


def test_every_callback_has_a_case() -> None:
    assert list(CASES) == callbacks.__all__


@pytest.mark.parametrize("case", [*CASES.values(), *EXAMPLES], ids=lambda case: type(case.make()).__name__)
def test_a_later_fit_equals_a_first_one(tmp_path: Path, case: Case) -> None:
    """The second of three fits is interrupted in the middle of a round."""
    recorder, callback, found = Recorder(), case.make(), []
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=[callback, recorder], system=case.system)
    for interrupts_in in (0, 2, 0):
        recorder.interrupts_in = interrupts_in
        method = case.method()
        with pytest.raises(KeyboardInterrupt) if interrupts_in else nullcontext():
            trainer.fit(method, case.data())
        state = {"callback": deepcopy(callback.state_dict()), "rows": recorder.rows, "weights": weights(method)}
        found.append({**state, "rounds": trainer.round_index, "scalars": [*trainer.callback_metrics]})
    assert_equal(found[2], found[0])


def test_an_interrupted_second_fit_shows_no_scalar_of_the_first(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = toy_trainer(tmp_path, callbacks=recorder)
    trainer.fit(toy_semifl(), ToyData())
    assert "test/accuracy" in trainer.callback_metrics
    recorder.interrupts_in = 1
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(toy_semifl(), ToyData())
    assert trainer.callback_metrics == {}
    assert trainer.participation == {}


def test_every_fit_has_a_folder_of_its_own_and_other_commands_use_the_last_one(tmp_path: Path) -> None:
    trainer, folders = toy_trainer(tmp_path, max_rounds=2), []
    for _ in range(2):
        model, data = toy_semifl(), ToyData()
        trainer.fit(model, data)
        folders.append(Path(str(trainer.log_dir)))
    trainer.test(model, data)
    assert Path(str(trainer.log_dir)) == folders[1]
    assert [folder.name for folder in folders] == ["version_0", "version_1"]
    assert {path.name for path in folders[0].parent.iterdir()} == {"version_0", "version_1"}
    for folder in folders:
        assert (folder / "checkpoints/last.ckpt").is_file()
        with (folder / "metrics.csv").open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file) if row["client/loss"]] == ["1", "2"]


def test_a_cut_row_of_the_resumed_run_is_left_out(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    first = Path(str(trainer.log_dir))
    rows = (first / "metrics.csv").read_text()
    (first / "metrics.csv").write_text(rows[: rows.rstrip().rindex("\n") + 8])
    trainer = toy_trainer(tmp_path, max_rounds=3)
    trainer.fit(toy_semifl(), ToyData(), ckpt_path="last")
    with (Path(str(trainer.log_dir)) / "metrics.csv").open(newline="") as file:
        found = {row["step"] for row in csv.DictReader(file)}
    assert {"1", "3"} <= found


METHODS = {
    "SemiFL": (toy_semifl, ToyData),
    "FedRGD": (toy_rgd, ToyData),
    "Fed-SHVR": (toy_shvr, uneven_clients),
    "Semi-SFL": (toy_semi_sfl, ToyData),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_second_fit_of_a_model_has_its_weights_and_nothing_else_of_the_first(name: str, tmp_path: Path) -> None:
    """Its clients' momenta, control variates and rounds belong to the first run."""
    make, data = METHODS[name]
    model, fresh, known = make(), make(), data()
    toy_trainer(tmp_path / "first", max_rounds=2).fit(model, known)
    build_model(fresh, known)
    load_state(fresh, clone(weights(model)))
    toy_trainer(tmp_path / "second", max_rounds=2).fit(model, data())
    toy_trainer(tmp_path / "fresh", max_rounds=2).fit(fresh, data())
    assert_same(weights(model), weights(fresh))


class RatesAtTheStart(FederatedCallback):
    """Collects the clients' learning rate at the start of each round, and the one that the round logs."""

    def __init__(self) -> None:
        self.at_start: list[float] = []
        self.logged: list[float] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.at_start.append(trainer.run.client_lr)

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.logged.append(metrics["lr"])


def test_a_callback_reads_the_rate_of_the_round_that_starts(tmp_path: Path) -> None:
    rates = RatesAtTheStart()
    toy_trainer(tmp_path, max_rounds=3, callbacks=rates).fit(toy_semifl(schedule=Cosine()), ToyData())
    assert rates.at_start == rates.logged
    assert len(set(rates.logged)) == 3


@pytest.mark.parametrize(("interval", "hours", "rounds"), [("step", 1e-7, 1), ("epoch", 1e-7, 1), ("step", 1, 2)])
def test_a_timer_ends_the_run_whatever_its_interval(tmp_path: Path, interval: str, hours: float, rounds: int) -> None:
    timer = Timer(duration=timedelta(hours=hours), interval=interval)
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=timer, logger=False)
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == rounds


class LastPictures(FederatedCallback):
    """Collects the rounds in which pictures are drawn, and whether they are the last ones."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_pictures(self, trainer: Any, algorithm: Any, is_last: bool) -> None:
        self.seen.append((trainer.round_index, is_last))


@pytest.mark.parametrize("stop", [2, 3])
def test_the_last_pictures_are_those_of_the_round_that_ends_the_run(tmp_path: Path, stop: int) -> None:
    pictures = LastPictures()
    toy_trainer(tmp_path, max_rounds=3, callbacks=[pictures, StopAfter(stop)]).fit(toy_semifl(), ToyData())
    assert pictures.seen == [(number, number == stop) for number in range(1, stop + 1)]


def test_an_evaluation_needs_no_trainer(tmp_path: Path) -> None:
    algorithm, trainer = toy_semifl(), toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(algorithm, ToyData())
    run = copy(trainer.run)
    run.hooks = Hooks([], FederatedCallback, None, algorithm)
    assert evaluate(run, "test")["test/accuracy"] == trainer.callback_metrics["test/accuracy"]
