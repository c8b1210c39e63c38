"""Runs tracked by Weights & Biases and MLflow, where they are installed, and by other loggers."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.cli import main
from tests.toy import ToyData, toy_semifl, toy_trainer

LOGGERS = {
    "wandb": "lightning.pytorch.loggers.WandbLogger --trainer.logger.project fedssl --trainer.logger.offline true",
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger --trainer.logger.tracking_uri file:./mlruns",
    "sqlalchemy": "lightning.pytorch.loggers.MLFlowLogger --trainer.logger.tracking_uri sqlite:///mlflow.db",
    "csv": "CSVLogger --trainer.logger.save_dir . --trainer.logger.name= --trainer.logger.version=",
}
"""Loggers without a folder for each run, by the module that they need; their options on the command line."""


@pytest.mark.parametrize("module", LOGGERS)
def test_each_run_has_a_folder_of_its_own(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("mlflow", module) if module == "sqlalchemy" else (module,):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(name, value)
    own = {name: f"my own {name}" for name in ("config.yaml", "data.txt", "result.json", "partition.json")}
    for name, text in own.items():
        Path(name).write_text(text)
    small = "--data.max_train_images 200 --data.max_test_images 50 --trainer.max_rounds 1 --trainer.devices 1"
    for seed in range(2):
        settings = f"--trainer.default_root_dir runs --seed_everything {seed} --trainer.logger {LOGGERS[module]}"
        assert main(["fit", "--config", "semifl_digits.yaml", *small.split(), *settings.split()]) == 0
        if module == "wandb":
            pytest.importorskip("wandb").finish()
    for version in range(2):
        folder = Path(f"runs/lightning_logs/version_{version}")
        assert json.loads((folder / "result.json").read_text())["seed"] == version
        for name in ("config.yaml", "data.txt", "report.html", "checkpoints/last.ckpt"):
            assert (folder / name).is_file()
    assert len([*tmp_path.glob("mlruns/*/*/metrics/test/accuracy")]) == 2 * (module == "mlflow")
    assert {name: Path(name).read_text() for name in own} == own
    assert not {"checkpoints", "report.html"} & {path.name for path in tmp_path.iterdir()}
    assert main(["export", "--default_root_dir", "runs", "--output", "model"]) == 0


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
