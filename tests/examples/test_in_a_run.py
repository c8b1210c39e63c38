"""The callbacks of examples/diagnostics, through the command line, as a reader runs them in a checkout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fedssl.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "callback", "images"),
    [
        ("semifl_digits", "client_pictures.ClientHeatMaps", {"clients/mask_rate", "clients/update_norm"}),
        ("fedshvr_digits", "loss_landscape.LossLandscape", {"loss_landscape"}),
    ],
)
def test_a_diagnostic_draws_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, callback: str, images: set[str]
) -> None:
    monkeypatch.chdir(ROOT)
    name = f"--trainer.callbacks+=examples.diagnostics.{callback}"
    short = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_rounds=2", "--data.max_train_images=200"]
    short += ["--model.threshold=0.3"] if "semifl" in config else []
    assert main(["fit", f"--config={config}.yaml", name, *short]) == 0

    folder = tmp_path / "lightning_logs" / "version_0"
    assert images <= set(EventAccumulator(str(folder)).Reload().Tags()["images"])
    if "Landscape" in callback:
        assert np.loadtxt(folder / "loss_landscape.csv", delimiter=",").std() > 0
