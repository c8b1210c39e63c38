"""What loggers such as those of Weights & Biases and MLflow are told."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_fedssl.callback import FederatedCallback
from tests.toy import ToyData, toy_semifl, toy_trainer


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
