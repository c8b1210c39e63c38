"""Pictures and texts reach Weights & Biases and MLflow; their loggers are stand-ins with Lightning's interface."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from matplotlib.figure import Figure

from lightning_fedssl.callback import FederatedCallback
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights


class Recorder:
    """Records the calls of every method."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self.calls.append((method, (*args, *kwargs.values())))

    def of(self, method: str) -> list[tuple[Any, ...]]:
        return [args for name, args in self.calls if name == method]


class StandInWandb(WandbLogger):
    """Weights & Biases without its package."""

    def __init__(self) -> None:
        self.record = Recorder()

    experiment = property(lambda self: self.record)

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        self.record.log_image(*args, **kwargs)

    def log_text(self, *args: Any, **kwargs: Any) -> None:
        self.record.log_text(*args, **kwargs)

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.record.log_metrics(*args, **kwargs)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.record.log_hyperparams(*args, **kwargs)

    def finalize(self, status: str) -> None:
        """Nothing is open."""

    name = version = "stand-in"
    save_dir = None


class StandInMLflow(MLFlowLogger):
    """MLflow without its package: ``experiment`` stands for its client."""

    def __init__(self) -> None:
        self.record = Recorder()

    experiment = property(lambda self: self.record)
    run_id = "run 7"

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.record.log_metrics(*args, **kwargs)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.record.log_hyperparams(*args, **kwargs)

    def finalize(self, status: str = "success") -> None:
        """Nothing is open."""

    name = version = "stand-in"
    save_dir = None


def test_a_run_shows_its_pictures_and_texts_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Histogram=list))
    wandb, mlflow = StandInWandb(), StandInMLflow()
    plain, shown = toy_semifl(), toy_semifl()
    toy_trainer(tmp_path, max_rounds=3, logger=False).fit(plain, ToyData())
    toy_trainer(tmp_path, max_rounds=3, logger=[wandb, mlflow], metrics=["confusion_matrix"]).fit(shown, ToyData())
    assert_same(weights(plain), weights(shown))
    pictures = {(name, step) for name, _, step in wandb.record.of("log_image")}
    assert {("partition", 0), ("val/confusion_matrix", 2)} <= pictures
    assert all(type(image) is Figure or image.shape[2] == 3 for _, (image,), _ in wandb.record.of("log_image"))
    assert {title for title, *_ in wandb.record.of("log_text")} >= {"partition", "method and paper"}
    files = {file: run for run, _, file in [*mlflow.record.of("log_figure"), *mlflow.record.of("log_image")]}
    assert set(files.values()) == {"run 7"}
    assert {"partition/round_00000.png"} <= set(files)
    assert "val/confusion_matrix/round_00002.png" in files
    assert {file for _, _, file in mlflow.record.of("log_text")} >= {"partition.md", "method and paper.md"}
    for logger in (wandb, mlflow):
        assert any("val/accuracy" in metrics for metrics, *_ in logger.record.of("log_metrics"))
        assert logger.record.of("log_hyperparams")


def test_nothing_is_drawn_without_a_logger_for_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CSVLogger has no pictures: drawing them would cost time for nothing."""
    monkeypatch.setattr("matplotlib.figure.Figure.__init__", lambda *args, **kwargs: pytest.fail("a figure was drawn"))
    algorithm = toy_semifl()
    toy_trainer(tmp_path, max_rounds=1, logger=False, metrics=["confusion_matrix"]).fit(algorithm, ToyData())
    assert torch.isfinite(next(algorithm.parameters())).all()


class Statuses(CSVLogger):
    """Records how the commands ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[str] = []

    def finalize(self, status: str) -> None:
        self.seen.append(status)
        super().finalize(status)


class EndsTheRun(FederatedCallback):
    """Sends a signal to the run, or fails in it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "error":
            raise OSError("the disk is full")


@pytest.mark.parametrize(("how", "status"), [("", "success"), ("signal", "success"), ("error", "failed")])
def test_loggers_are_told_whether_a_run_failed(tmp_path: Path, how: str, status: str) -> None:
    """MLflow marks a run by this word, and Weights & Biases uploads checkpoints after a success only."""
    logger = Statuses(tmp_path)
    trainer = toy_trainer(tmp_path, max_rounds=2, logger=logger, callbacks=EndsTheRun(how))
    with pytest.raises(OSError, match="the disk is full") if how == "error" else nullcontext():
        trainer.fit(toy_semifl(), ToyData())
    assert logger.seen == [status]
