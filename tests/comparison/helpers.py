"""Runs of ``fake_fit.py``, for tests of what starts them; light to import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.plan import Resolved, Run, slug
from lightning_fedssl.comparison.results import Row
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.task import Classification

FAKE = [sys.executable, str(Path(__file__).with_name("fake_fit.py"))]
"""The command in the place of ``python -m lightning_fedssl``."""


def run_of(
    entry: SuiteEntry | str = "A", seed: int = 0, partition: str = "p", weights: str = "1", **settings: Any
) -> Run:
    """A run of the fake ``fit`` with these settings."""
    entry = SuiteEntry(entry, "a.yaml") if isinstance(entry, str) else entry
    trainer = {"max_rounds": settings.get("rounds", 3)}
    config = {"trainer": trainer, "model": {"init_args": {"network": "n"}}, "data": settings.pop("data", {})}
    resolved = Resolved(json.dumps({"rounds": 3, **settings}), config, None, None, None)  # type: ignore[arg-type]
    folder = Path("runs") / slug(entry.label) / f"seed_{seed}_x"
    return Run(SuiteGroup("G", [entry]), entry, seed, resolved, partition, {"w": weights}, folder, Classification())


def rounds_of(test_accuracy: float, *accuracies: float, server_steps: float = 10) -> list[Row]:
    """Logged rounds of 10 MB and 1 simulated second each, with these validation accuracies."""
    rows: list[Row] = [
        {
            "step": t,
            "val/accuracy": value,
            "communication/upload_bytes": 1e7,
            "system/seconds": float(t),
            "server/steps": server_steps,
        }
        for t, value in enumerate(accuracies, 1)
    ]
    rows[-1] |= {"test/accuracy": test_accuracy, "test/loss": 0.1}
    return rows


GOOD = (0.5, 0.9, 0.8, 0.95)
LOW = (0.1, 0.1, 0.1, 0.1)


def comparison() -> tuple[Suite, list[Outcome]]:
    """A bound and two methods over three seeds; two runs of one method failed."""
    bound, good, bad = SuiteEntry("Bound", "b.yaml", "bound"), SuiteEntry("Good", "g.yaml"), SuiteEntry("Bad", "h.yaml")
    suite = Suite("T", [SuiteGroup("G", [bad, bound, good], note="A note.")], [0, 1, 2], 0.9)
    logged = {
        bound.label: (bound, [rounds_of(value, *LOW) for value in (0.5, 0.6, 0.7)]),
        good.label: (good, [rounds_of(0.61, *GOOD, server_steps=11.5), rounds_of(0.72, *LOW), rounds_of(0.86, *GOOD)]),
        bad.label: (bad, [rounds_of(0.4, *LOW, server_steps=20), [], []]),
    }
    outcomes = [
        Outcome(run_of(entry, seed), rows, "trained" if rows else "failed", 1.0)
        for entry, seeds in logged.values()
        for seed, rows in enumerate(seeds)
    ]
    return suite, outcomes
