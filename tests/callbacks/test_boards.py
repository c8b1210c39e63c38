"""Scalars reach Weights & Biases and MLflow; their loggers are stand-ins with Lightning's interface."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger

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


def test_a_run_reaches_both(tmp_path: Path) -> None:
    wandb, mlflow = StandInWandb(), StandInMLflow()
    plain, shown = toy_semifl(), toy_semifl()
    toy_trainer(tmp_path, max_rounds=3, logger=False).fit(plain, ToyData())
    toy_trainer(tmp_path, max_rounds=3, logger=[wandb, mlflow]).fit(shown, ToyData())
    assert_same(weights(plain), weights(shown))
    for logger in (wandb, mlflow):
        assert any("val/accuracy" in metrics for metrics, *_ in logger.record.of("log_metrics"))
        assert logger.record.of("log_hyperparams")


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
