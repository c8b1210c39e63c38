"""bfloat16 on processors without instructions for it: a warning, and nothing that ``tune`` measures."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_fedssl.cli.compare import warn_of_slow_precision
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.trainer import processor, setup, tuning
from lightning_fedssl.trainer.processor import emulates_bfloat16
from tests.fake_runs import run_of
from tests.test_tuning import PLAIN, report
from tests.toy import ToyData, toy_semifl, toy_trainer


@pytest.mark.parametrize(
    ("machine", "in_onednn", "emulated"),
    [
        ("x86_64", False, True), ("AMD64", False, True), ("x86_64", True, False),
        ("aarch64", False, False), ("arm64", False, False), ("aarch64", True, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])
def test_an_x86_processor_on_which_onednn_lacks_bfloat16_emulates_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, in_onednn: bool, emulated: bool, capability: str
) -> None:
    """Whatever the capability is: AVX-NE-CONVERT needs no AVX512, and ATEN_CPU_CAPABILITY does not reach oneDNN."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: in_onednn)
    assert emulates_bfloat16() is emulated


@pytest.mark.parametrize(("capability", "emulated"), [("AVX2", True), ("AVX512", False)])
def test_a_pytorch_that_cannot_be_asked_is_judged_by_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: str, emulated: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert emulates_bfloat16() is emulated


def test_this_pytorch_can_be_asked() -> None:
    assert not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)


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
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, precision: str, emulated: bool,
    warnings: int,
) -> None:  # fmt: skip
    """The warnings of its runs are in their log files."""
    monkeypatch.setattr(processor, "emulates_bfloat16", lambda: emulated)
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        warn_of_slow_precision(runs_in(precision, tmp_path))
    assert caplog.text.count("give --trainer.precision 32-true") == warnings


@pytest.mark.parametrize("finished", ["A", "AB"])
def test_a_finished_comparison_does_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, finished: str
) -> None:
    monkeypatch.setattr(processor, "emulates_bfloat16", lambda: True)
    runs = runs_in("bf16-mixed", tmp_path)
    for run in runs[: len(finished)]:
        version = run.folder / "lightning_logs" / "version_0"
        version.mkdir(parents=True)
        (version / "metrics.csv").write_text("step,test/accuracy\n1,0.5\n")
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        warn_of_slow_precision(runs)
    assert bool(caplog.messages) == (finished == "A")


def runs_in(precision: str, folder: Path) -> list[Run]:
    """Two runs on the CPU."""
    config = {"trainer": {"accelerator": "cpu", "precision": precision}}
    runs = map(run_of, "AB")
    return [
        replace(run, resolved=replace(run.resolved, config=config), folder=folder / run.entry.label) for run in runs
    ]
