"""The table of communication costs has the bytes that a run sends."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from lightning_fedssl.cli import main

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("config", ["fedavg_digits.yaml", "fedshvr_digits.yaml", "semisfl_digits.yaml"])
def test_the_table_has_what_a_client_sends_and_receives(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    costs = importlib.import_module("costs")

    def fit_here(config: str, folder: Path, *options: str) -> None:
        assert main(["fit", f"--config={config}", f"--trainer.default_root_dir={folder}", *options]) == 0

    monkeypatch.setattr(costs.command_line, "fit", fit_here)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # put back afterwards
    row = re.search(rf"^\| `{config}` \|(.*)\|$", (BENCHMARKS / "results" / "costs.md").read_text(), re.MULTILINE)
    assert row is not None
    lines = costs.ledger(
        config, ["--trainer.callbacks+=CommunicationLedger", "--trainer.max_rounds=2", "--trainer.devices=1"]
    )
    assert [part.strip() for part in row[1].split("|")][:4] == [*costs.cell(lines, "down"), *costs.cell(lines, "up")]
