"""Runs of ``fake_fit.py``, for tests of what starts them; light to import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lightning_fedssl.comparison.plan import Resolved, Run, Start, slug
from lightning_fedssl.comparison.suite import SuiteEntry, SuiteGroup

FAKE = [sys.executable, str(Path(__file__).with_name("fake_fit.py"))]
"""The command in the place of ``python -m lightning_fedssl``."""


def run_of(label: str = "A", start: Start | None = None, seed: int = 0, **settings: Any) -> Run:
    """A run of the fake ``fit`` with these settings."""
    entry = SuiteEntry(label, "a.yaml")
    network = {"init_args": {"network": "n"}}
    config = {"trainer": {"max_rounds": settings.get("rounds", 3)}, "model": network, "data": {}}
    resolved = Resolved(json.dumps({"rounds": 3, **settings}), config, None, None)  # type: ignore[arg-type]
    folder = Path("runs") / slug(label) / f"seed_{seed}_x"
    return Run(SuiteGroup("G", [entry]), entry, seed, resolved, start or Start("p", {"w": "1"}), "c", folder)
