"""Writes the result of a run as one JSON file, for scripts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.labels_alone import LabelsAlone
from lightning_fedssl.functional.by_name import mapped
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import Run


class RunResult(FederatedCallback):
    """Writes ``result.json`` into the run folder after ``fit``, ``validate`` and ``test``. Part of
    every run.
    """

    def on_fit_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the file; for an interrupted run it has the metrics of the last round."""
        _write(trainer, algorithm)

    def on_evaluation_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Write the file after ``validate`` and ``test``."""
        if trainer.state.fn != TrainerFn.FITTING:
            _write(trainer, algorithm, metrics)


def summarize_run(
    trainer: Run,
    algorithm: FederatedAlgorithm,
    metrics: Mapping[str, float | Tensor] | None = None,
) -> dict[str, Any]:
    """The result of a command, as values that JSON can represent.

    Args:
        trainer: The trainer of the run.
        algorithm: The run's method.
        metrics: The scalars; by default the last value of every scalar of the run.
    """
    values = trainer.callback_metrics if metrics is None else metrics
    return {
        "command": str(trainer.state.fn.value) if trainer.state.fn else None,
        "interrupted": trainer.state.status == TrainerStatus.INTERRUPTED,
        "method": type(algorithm).__name__,
        "round": trainer.round_index,
        "seed": trainer.seed,
        "partition": trainer.datamodule.split.hash,
        "run_folder": trainer.log_dir,
        "ckpt_path": trainer.ckpt_path and str(trainer.ckpt_path),
        "version": __version__,
        "privacy": trainer.describe_privacy(),
        "chosen/method": next(
            (c.chosen or None for c in trainer.callbacks if isinstance(c, LabelsAlone)), None
        ),
        "matrices": {
            name: matrix.tolist()
            for name, matrix in trainer.metric_values.items()
            if matrix.dim() == 2
        },
        "metrics": {name: float(value) for name, value in sorted(values.items())},
    }


def as_json(value: Any, indent: int | None = None) -> str:
    """Values as JSON; numbers that are NaN or infinite, which JSON does not have, become ``null``.

    Args:
        value: Nested dicts and lists of plain values.
        indent: As in :func:`json.dumps`.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return mapped(_finite, value)
    if isinstance(value, (list, tuple)):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(
    trainer: Run,
    algorithm: FederatedAlgorithm,
    metrics: Mapping[str, float | Tensor] | None = None,
) -> None:
    if trainer.is_global_zero and trainer.log_dir and not trainer.fast_dev_run:
        text = as_json(summarize_run(trainer, algorithm, metrics), indent=2)
        Path(trainer.log_dir, "result.json").write_text(text + "\n", encoding="utf-8")
