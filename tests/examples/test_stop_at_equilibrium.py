from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from examples.diagnostics.stop_at_equilibrium import StopAtEquilibrium
from lightning.pytorch.callbacks import Callback, EarlyStopping

from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights


def stopped_after(losses: list[float], **options: Any) -> int | None:
    """The round after which a run with such losses ends."""
    callback = StopAtEquilibrium(**options)
    trainer: Any = SimpleNamespace(should_stop=False, round_index=0, is_global_zero=True)
    algorithm: Any = None
    for number, loss in enumerate(losses, start=1):
        trainer.round_index = number
        callback.on_round_end(trainer, algorithm, {"server/loss": loss})
        if trainer.should_stop:
            return number
    return None


def test_the_mean_of_a_full_window_decides() -> None:
    losses = [0.0, 0.0, 0.5, 0.3, 0.2, 0.0, 0.0]  # means of three: .17, .27, .33, .17, .07
    assert stopped_after(losses, threshold=0.1, window=3) == 7
    assert stopped_after(losses, threshold=0.2, window=3) == 3
    assert stopped_after(losses, threshold=0.06, window=3) is None
    assert stopped_after([0.011] * 30) is None
    assert stopped_after([0.009] * 30) == 10


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda: StopAtEquilibrium(100.0, window=2), 2),
        (lambda: EarlyStopping("val/loss", patience=1, min_delta=100.0), 2),
        (lambda: EarlyStopping("val/loss", stopping_threshold=100.0), 1),
    ],
    ids=["StopAtEquilibrium", "EarlyStopping", "EarlyStopping in round 1"],
)
def test_a_run_that_had_ended_ends_at_once_when_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Callback], last: int
) -> None:
    trainers, models = [], []
    for ckpt_path in (None, "last"):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lightning_fedssl"):
            trainers.append(toy_trainer(tmp_path, max_rounds=6, callbacks=[make()]))
            models.append(toy_semifl())
            trainers[-1].fit(models[-1], ToyData(), ckpt_path=ckpt_path)
    assert [trainer.round_index for trainer in trainers] == [last, last]
    assert_same(weights(models[0]), weights(models[1]))
    assert trainers[0].callback_metrics["test/accuracy"] == trainers[1].callback_metrics["test/accuracy"]
    assert f"had ended this run after round {last}: nothing to train" in caplog.text


def test_the_window_is_kept_in_the_checkpoint() -> None:
    first, second = StopAtEquilibrium(window=3), StopAtEquilibrium(window=3)
    trainer: Any = SimpleNamespace(should_stop=False, round_index=1, is_global_zero=True)
    algorithm: Any = None
    for _ in range(2):
        first.on_round_end(trainer, algorithm, {"server/loss": 0.0})
    second.load_state_dict(first.state_dict())
    second.on_round_end(trainer, algorithm, {"server/loss": 0.0})
    assert trainer.should_stop


def test_a_scalar_that_is_not_logged_is_refused_by_name() -> None:
    trainer: Any = SimpleNamespace(round_index=1, should_stop=False)
    algorithm: Any = None
    losses = {"server/loss": 1.0, "client/loss": 1.0, "val/accuracy": 1.0}
    with pytest.raises(ValueError, match="round 1 has no scalar server/los"):
        StopAtEquilibrium(monitor="server/los").on_round_end(trainer, algorithm, losses)


def test_a_round_without_clients_does_not_count_for_a_loss_of_the_clients(tmp_path: Path) -> None:
    """With threshold 1 no client has a confident image, so that none trains and ``client/loss`` is not logged."""
    callback = StopAtEquilibrium(monitor="client/loss", window=1)
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=[callback], logger=False)
    trainer.fit(toy_semifl(threshold=1.0), ToyData())
    assert trainer.round_index == 2
    assert callback.losses == []
