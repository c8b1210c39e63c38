"""Writes the result of a run as one JSON file, for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.labels_alone import LabelsAlone
from lightning_fedssl.functional.by_name import mapped
from lightning_fedssl.storage.files import as_json, write_bytes
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
        if not trainer.training:
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
    answers = [each.answer for each in trainer.callbacks if isinstance(each, LabelsAlone)]
    answer = next(filter(None, answers), None)
    return {
        "command": str(trainer.state.fn.value) if trainer.state.fn else None,
        "interrupted": trainer.interrupted,
        "method": type(algorithm).__name__,
        "round": trainer.round_index,
        "seed": trainer.seed,
        "partition": trainer.datamodule.split.hash,
        "class_shares": trainer.datamodule.stated and trainer.datamodule.stated.text,
        "run_folder": trainer.log_dir,
        "ckpt_path": trainer.ckpt_path and str(trainer.ckpt_path),
        "version": __version__,
        "privacy": trainer.describe_privacy(),
        "answer": answer.values() if answer else None,
        "matrices": {
            name: t.tolist()
            for name, t in trainer.metric_values.items()
            if t.dim() == 2 and not name.endswith("/largest_errors")  # true labels of samples
        },
        "metrics": mapped(float, dict(sorted(values.items()))),
    }


def _write(
    trainer: Run,
    algorithm: FederatedAlgorithm,
    metrics: Mapping[str, float | Tensor] | None = None,
) -> None:
    if trainer.is_global_zero and trainer.log_dir and not trainer.fast_dev_run:
        text = as_json(summarize_run(trainer, algorithm, metrics), indent=2)
        write_bytes(Path(trainer.log_dir, "result.json"), f"{text}\n".encode())
