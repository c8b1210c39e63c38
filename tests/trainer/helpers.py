"""Helpers of the trainer's tests: what a run has logged, and a run that stops early."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning_fedssl.callback import FederatedCallback


def logged(trainer: Any) -> dict[int, dict[str, str]]:
    """What the CSV says of each round, without times."""
    rows: dict[int, dict[str, str]] = {}
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            kept = {k: v for k, v in row.items() if v and not k.startswith("time/")}
            rows.setdefault(int(row["step"]), {}).update(kept)
    return rows


class StopAfter(FederatedCallback):
    """Ends a run early, as an interruption would, with the schedule of the whole run."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        trainer.should_stop = trainer.round_index == self.last
