from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.storage import checkpoint_file
from tests.toy import ToyData, toy_semifl, toy_trainer


def test_a_checkpoint_of_lightning_s_holds_what_the_other_callbacks_did_in_its_round(tmp_path: Path) -> None:
    class Counts(FederatedCallback):
        rounds = 0

        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            self.rounds += 1

        def state_dict(self) -> dict[str, Any]:
            return {"rounds": self.rounds}

    own = ModelCheckpoint(tmp_path / "own", filename="{epoch}", save_top_k=-1)
    toy_trainer(tmp_path, callbacks=[own, Counts()]).fit(toy_semifl(), ToyData())
    saved = {checkpoint_file.load(path)["round"]: path for path in (tmp_path / "own").glob("*.ckpt")}
    for number, path in saved.items():
        (state,) = (s for s in checkpoint_file.load(path)["callbacks"].values() if "rounds" in s)
        assert state == {"rounds": number}
    assert sorted(saved) == [1, 2, 3]


def test_a_second_fit_forgets_the_end_and_the_best_round_of_the_first(tmp_path: Path) -> None:
    class Stopping(FederatedCheckpoint):
        stop_after = 2

        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            super().on_round_end(trainer, algorithm, metrics)
            trainer.should_stop |= trainer.round_index == self.stop_after

    checkpoint = Stopping(every_n_rounds=10)
    trainer = toy_trainer(tmp_path / "a", max_rounds=3, callbacks=checkpoint)
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 2
    checkpoint.stop_after, checkpoint.best_value = 0, 2.0
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 3
    assert checkpoint.best_value < 2
    other = toy_trainer(tmp_path / "b", max_rounds=3, callbacks=checkpoint)
    other.fit(toy_semifl(), ToyData())
    folder = Path(str(other.log_dir)) / "checkpoints"
    assert (folder / "last.ckpt").is_file()
    assert (folder / "best.ckpt").is_file()


@pytest.mark.parametrize(
    ("accuracies", "monitor", "named"),
    [
        ((0.6, 0.7, 0.64), "val/accuracy", ["val/accuracy was 70.0 % in round 2 and is 64.0 % now: best.ckpt has"]),
        ((0.6, 0.7, 0.64, 0.66), "val/accuracy", []),
        ((0.6, 0.7, 0.1), "val/loss", []),
    ],
    ids=["declined", "recovered", "no accuracy"],
)
def test_a_run_that_ends_below_its_best_accuracy_names_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accuracies: tuple[float, ...], monitor: str, named: list[str]
) -> None:
    class Accuracies(FederatedCallback):
        """Replaces the validation's result by given numbers."""

        def on_evaluation_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            if monitor in metrics:
                metrics[monitor] = accuracies[trainer.round_index - 1]

    trainer = toy_trainer(
        tmp_path, max_rounds=len(accuracies), callbacks=[Accuracies(), FederatedCheckpoint(monitor, every_n_rounds=9)]
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(toy_semifl(), ToyData(validation=0.25))
    found = [record.getMessage() for record in caplog.records if "best.ckpt" in record.getMessage()]
    assert [message[: len(text)] for message, text in zip(found, named, strict=True)] == named


def test_checkpoint_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every_n_rounds"):
        FederatedCheckpoint(every_n_rounds=0)
