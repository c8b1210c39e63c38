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


class Records:
    """The part of a logger that stands for its package: what is logged, by the method's name."""

    name = version = run_id = "stand-in"
    save_dir = experiment = None

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.settings: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.append(metrics)

    def log_hyperparams(self, params: Any) -> None:
        self.settings.append(params)

    def finalize(self, status: str = "success") -> None:
        """Nothing is open."""


class StandInWandb(Records, WandbLogger):
    """Weights & Biases without its package."""


class StandInMLflow(Records, MLFlowLogger):
    """MLflow without its package."""


def test_a_run_reaches_both(tmp_path: Path) -> None:
    wandb, mlflow = StandInWandb(), StandInMLflow()
    plain, shown = toy_semifl(), toy_semifl()
    toy_trainer(tmp_path, max_rounds=3, logger=False).fit(plain, ToyData())
    toy_trainer(tmp_path, max_rounds=3, logger=[wandb, mlflow]).fit(shown, ToyData())
    assert_same(weights(plain), weights(shown))
    for logger in (wandb, mlflow):
        assert any("val/accuracy" in metrics for metrics in logger.metrics)
        assert logger.settings


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
