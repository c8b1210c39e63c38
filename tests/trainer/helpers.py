"""Helpers of the trainer's tests: what a run has logged, and a run that stops early."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.run import Run
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.judge import Judge
from tests.toy import forked, toy_trainer, weights


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


def judged_by(judge: type[Judge]) -> Callable[[Run], SimulatedFederation]:
    """Makes a simulation in which another judge decides about the updates."""

    def make(run: Run) -> SimulatedFederation:
        federation = SimulatedFederation(run)
        federation.judge = judge(run.algorithm, run.fabric, run.hooks, run.scalars)
        return federation

    return make


def run(tmp_path: Path, ranks: int, make: Any, data: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Fit on a number of ranks; the weights, the trainer and the algorithm."""
    algorithm = make()
    trainer = toy_trainer(
        tmp_path / str(ranks), **forked(ranks),
        **{"max_rounds": 3, "callbacks": [StaticBatchNorm(source="moments")]} | kwargs,
    )  # fmt: skip
    trainer.fit(algorithm, data())
    return weights(algorithm), trainer, algorithm


def assert_equal(a: Any, b: Any) -> None:
    """Assert that nested values are equal, tensors bitwise."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            assert_equal(a[name], b[name])
    else:
        assert a == b
