"""Writes the result of a run as one JSON file, for scripts, and as a row of TensorBoard's table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.labels_alone import LabelsAlone
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.storage.files import as_json, write_bytes
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView


class RunResult(FederatedCallback):
    """Writes ``result.json`` into the run folder after ``fit``, ``validate`` and ``test``. Part of
    every run.

    TensorBoard's tab *HParams* gets one row per run: method, seed, the settings of trainer, data,
    partition, network, optimizers and schedule by their keys, and the final test accuracy. The runs
    of a folder form a table.
    """

    def on_fit_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the file, and a row of the table of runs.

        For an interrupted run the file has the metrics of the last round, and no row is written.
        """
        _write(trainer, algorithm)
        name = f"test/{trainer.datamodule.task.monitor}"
        if name not in trainer.callback_metrics:
            return
        from torch.utils.tensorboard.summary import hparams

        row = {"method": type(algorithm).__name__, "seed": trainer.seed, **trainer.table_row}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                for summary in hparams(row, {name: float(trainer.callback_metrics[name])}):
                    logger.experiment.file_writer.add_summary(summary)

    def on_evaluation_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Write the file after ``validate`` and ``test``."""
        if not trainer.training:
            _write(trainer, algorithm, metrics)


def summarize_run(
    trainer: TrainerView,
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
            for name, t in trainer.run.scalars.metrics.items()
            if t.dim() == 2 and not name.endswith("/largest_errors")  # true labels of samples
        },
        "metrics": map_values(float, dict(sorted(values.items()))),
    }


def _write(
    trainer: TrainerView,
    algorithm: FederatedAlgorithm,
    metrics: Mapping[str, float | Tensor] | None = None,
) -> None:
    if trainer.is_global_zero and trainer.log_dir and not trainer.fast_dev_run:
        text = as_json(summarize_run(trainer, algorithm, metrics), indent=2)
        write_bytes(Path(trainer.log_dir, "result.json"), f"{text}\n".encode())
