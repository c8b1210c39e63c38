"""bfloat16 on processors without instructions for it: a warning, and nothing that ``tune`` measures."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_fedssl.cli.compare import warn_of_slow_precision
from lightning_fedssl.trainer import processor, setup, tuning
from lightning_fedssl.trainer.processor import emulates_bfloat16
from tests.fake_runs import run_of
from tests.test_tuning import PLAIN, report
from tests.toy import ToyData, toy_semifl, toy_trainer


@pytest.mark.parametrize(
    ("machine", "capability", "emulated"),
    [
        ("x86_64", "AVX2", True), ("AMD64", "DEFAULT", True), ("x86_64", "AVX512", False),
        ("aarch64", "DEFAULT", False), ("arm64", "DEFAULT", False), ("aarch64", "SVE256", False),
    ],
)  # fmt: skip
def test_an_x86_processor_without_avx512_emulates_bfloat16(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, emulated: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert emulates_bfloat16() is emulated


@pytest.mark.parametrize(
    ("precision", "emulated", "warns"), [("bf16-mixed", True, 1), ("bf16-mixed", False, 0), ("32-true", True, 0)]
)
def test_a_run_in_emulated_bfloat16_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, precision: str, emulated: bool,
    warns: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(setup, "emulates_bfloat16", lambda: emulated)
    trainer = toy_trainer(tmp_path, precision=precision, max_rounds=1, logger=False)
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        trainer.fit(toy_semifl(), ToyData())
    assert caplog.text.count("give --trainer.precision 32-true") == warns


@pytest.mark.parametrize("emulated", [True, False])
def test_tune_leaves_out_emulated_bfloat16_and_says_so(monkeypatch: pytest.MonkeyPatch, emulated: bool) -> None:
    monkeypatch.setattr(tuning, "emulates_bfloat16", lambda: emulated)
    precisions = {setting.precision for setting in tuning.settings_to_try(cores=2, clients=10)}
    assert precisions == ({"32-true"} if emulated else {"32-true", "bf16-mixed"})
    exact = tuning.TuningReport([row for row in report().rows if row.setting == PLAIN], 0.0, 2)
    assert ("bfloat16 was not tried" in exact.text()) is emulated
    assert "bfloat16 was not tried" not in report().text()  # both were measured


@pytest.mark.parametrize(
    ("precision", "emulated", "warnings"), [("bf16-mixed", True, 1), ("bf16-mixed", False, 0), ("32-true", True, 0)]
)
def test_a_comparison_in_emulated_bfloat16_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, precision: str, emulated: bool, warnings: int
) -> None:
    """The warnings of its runs are in their log files."""
    monkeypatch.setattr(processor, "emulates_bfloat16", lambda: emulated)
    keys = {"accelerator": "cpu", "precision": precision}
    runs = [replace(run, resolved=replace(run.resolved, config={"trainer": keys})) for run in map(run_of, "AB")]
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        warn_of_slow_precision(runs)
    assert caplog.text.count("give --trainer.precision 32-true") == warnings
