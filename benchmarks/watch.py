"""Writes the intermediate results of a long benchmark run, so that the run can be stopped and resumed."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fedssl.callback import FederatedCallback


class Watch(FederatedCallback):
    """Appends a row to a CSV after each validation, and counts CPU seconds across interruptions.

    Args:
        path: The CSV.
        key: Names and values of the columns that identify the run.
    """

    def __init__(self, path: str, key: dict[str, str]) -> None:
        self.path = Path(path)
        self.key = key
        self._before = 0.0
        self._started = time.process_time()

    def seconds(self) -> float:
        """CPU seconds of the run so far, including those of earlier processes."""
        return self._before + time.process_time() - self._started

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Write the validation accuracy in per cent, the validation loss and the clients' loss."""
        if "val/accuracy" in metrics:
            values = {
                "round": trainer.round_index,
                "accuracy": f"{100 * metrics['val/accuracy']:.2f}",
                "loss": f"{metrics['val/loss']:.4f}",
                "client_loss": f"{metrics['client/loss']:.4f}",
            }
            add_row(self.path, [*self.key, *values], [*self.key.values(), *values.values()])

    def state_dict(self) -> dict[str, Any]:
        """The CPU seconds of the run so far."""
        return {"seconds": self.seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self._before = state_dict["seconds"]


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add_row(path: Path, columns: Sequence[str], values: Sequence[object]) -> None:
    """Append a row to a CSV, with the header if the file is new.

    Args:
        path: The file.
        columns: Their names.
        values: One per column.
    """
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns)
        writer.writerow(values)
