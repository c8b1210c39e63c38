"""The table of communication costs has the bytes that a run sends."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("config", ["fedavg_digits.yaml", "fedshvr_digits.yaml", "semisfl_digits.yaml"])
def test_the_table_has_what_a_client_sends_and_receives(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    costs = importlib.import_module("costs")
    row = re.search(rf"^\| `{config}` \|(.*)\|$", (BENCHMARKS / "results" / "costs.md").read_text(), re.MULTILINE)
    assert row is not None
    lines = costs.ledger(config, ["--trainer.callbacks+=CommunicationLedger", "--trainer.max_rounds=2"])
    assert [part.strip() for part in row[1].split("|")][:4] == [*costs.cell(lines, "down"), *costs.cell(lines, "up")]
