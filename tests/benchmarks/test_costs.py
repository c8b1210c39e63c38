"""The table of communication costs has the bytes that a run sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.cli import main

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "costs.md"


@pytest.mark.parametrize("config", ["fedavg_digits.yaml", "fedshvr_digits.yaml", "semisfl_digits.yaml"])
def test_the_table_has_what_a_client_sends_and_receives(
    script: Any, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit_here(config: str, folder: Path, *options: str) -> None:
        assert main(["fit", f"--config={config}", f"--trainer.default_root_dir={folder}", *options]) == 0

    monkeypatch.setattr(script.command_line, "fit", fit_here)
    row = re.search(rf"^\| `{config}` \|(.*)\|$", TABLE.read_text(), re.MULTILINE)
    assert row is not None
    options = ["--trainer.callbacks+=CommunicationLedger", "--trainer.max_rounds=2", "--trainer.devices=1"]
    lines = script.ledger(config, options)
    assert [part.strip() for part in row[1].split("|")][:4] == [*script.cell(lines, "down"), *script.cell(lines, "up")]
