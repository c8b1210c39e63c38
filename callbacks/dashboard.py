"""A row in TensorBoard's table of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import Run


class Dashboard(FederatedCallback):
    """Writes the hyper-parameters of a run for TensorBoard.

    It does not affect training.

    The tab *HParams* gets one row per run: method, seed, the settings of trainer, data, partition,
    network, optimizers and schedule by their keys, and the final test accuracy. The runs of a
    folder form a table. Part of every run.
    """

    def on_fit_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the row.

        An interrupted run gets no row, because it has no test result.
        """
        name = f"test/{trainer.datamodule.task.monitor}"
        result = trainer.callback_metrics.get(name)
        if result is None:
            return
        from torch.utils.tensorboard.summary import hparams

        row = {"method": type(algorithm).__name__, "seed": trainer.seed, **trainer.table_row}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                for summary in hparams(row, {name: float(result)}):
                    logger.experiment.file_writer.add_summary(summary)
