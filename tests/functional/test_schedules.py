from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl import Experiment
from lightning_fedssl.functional.schedules import Constant, Cosine, FractionalCosine, Schedule
from tests.toy import ToyData, toy_semifl, toy_trainer


def test_semifl_learning_rates() -> None:
    """0.03 (1 + cos(pi (t - 1) / 800)) / 2: half in the middle, 0.03 (pi / 800)^2 / 4 = 1.157e-7 in the last round."""
    schedule = Cosine()
    rates = {t: 0.03 * schedule.factor(t, 800) for t in (1, 401, 800)}
    assert rates[1] == pytest.approx(0.03, abs=1e-15)
    assert rates[401] == pytest.approx(0.015, abs=1e-12)
    assert rates[800] == pytest.approx(1.157e-7, rel=1e-3)


def test_own_length_and_floor() -> None:
    """After its own 10 rounds the factor stays at the final value."""
    assert Cosine(rounds=10, final=0.1).factor(11, 800) == pytest.approx(0.1)
    assert Cosine(rounds=10, final=0.1).factor(500, 800) == pytest.approx(0.1)
    assert Constant().factor(500, 800) == 1.0
    with pytest.raises(ValueError, match=r"schedule\.rounds"):
        Cosine(rounds=0)


def test_a_warm_up_as_long_as_the_run_is_named_at_its_start(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    options = {"trainer.max_rounds": 1, "trainer.fast_dev_run": True, "trainer.default_root_dir": str(tmp_path)}
    schedule = {"class_path": "FractionalCosine", "init_args": {"warmup_rounds": 1}}
    trainer, model, data = Experiment.from_config("fedavg_digits.yaml", {**options, "model.schedule": schedule})
    trainer.fit(model, data)
    assert "model.schedule.warmup_rounds is 1, but the run has 1 rounds" in caplog.text
    assert FractionalCosine(warmup_rounds=3).problem(4) == FractionalCosine().problem(1) == Cosine().problem(1) == ""


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), None, "0.5"])
def test_a_factor_of_a_user_s_own_schedule_is_checked(value: Any) -> None:
    class Own(Schedule):
        def factor(self, round_index: float, max_rounds: int) -> float:
            return value  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"model\.schedule: Own\.factor\(2, 10\) is .*; a factor .* finite number"):
        Own().checked_factor(2, 10)
    assert Schedule().checked_factor(2, 10) == 1.0


def test_a_schedule_that_is_written_as_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the schedule Halved has __call__.*: name the method factor\(self"):

        class Halved(Schedule):
            def __call__(self, round_index: float) -> float:
                return float(0.5**round_index)


def test_a_schedule_may_know_the_rounds_of_the_run_only(tmp_path: Path) -> None:
    class Listed(Schedule):
        def factor(self, round_index: float, max_rounds: int) -> float:
            return [1.0, 0.5, 0.1][int(round_index) - 1]

    trainer = toy_trainer(tmp_path, max_rounds=3)
    algorithm = toy_semifl(schedule=Listed())
    seen = []
    algorithm.on_round_start = lambda: seen.append(trainer.round.lr_factor)
    trainer.fit(algorithm, ToyData())
    assert seen == [1.0, 0.5, 0.1]
