"""Writes which clients took part in which rounds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.system import Outcome

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import Run

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""The outcomes in the order of their numbers in a checkpoint."""


class ParticipationTable(FederatedCallback):
    """Writes which clients took part in which rounds, as ``participation.csv``.

    The file has a line for every round and selected client, in the drawn order: round, client,
    outcome. It is written when the run ends. A resumed run continues it. Part of every run in which
    clients may be missing (``trainer.faults``).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.rounds: dict[int, dict[int, Outcome]] = {}

    def on_round_end(self, trainer: Run, algorithm: FederatedAlgorithm, metrics: Metrics) -> None:
        """Record the outcomes of the round."""
        self.rounds[trainer.round_index] = dict(trainer.participation)

    def on_train_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the table."""
        if not trainer.is_global_zero or not trainer.log_dir or trainer.fast_dev_run:
            return
        folder = Path(trainer.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "participation.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("round", "client", "outcome"))
            for round_index, outcomes in self.rounds.items():
                for client, outcome in outcomes.items():
                    writer.writerow((round_index, client, outcome))

    def state_dict(self) -> dict[str, Any]:
        """A row for every round and selected client: round, client, number of the outcome."""
        rows = [
            (t, k, OUTCOMES.index(o))
            for t, outcomes in self.rounds.items()
            for k, o in outcomes.items()
        ]
        return {"rows": torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.rounds = {}
        for round_index, client, number in state_dict["rows"].tolist():
            self.rounds.setdefault(round_index, {})[client] = OUTCOMES[number]
