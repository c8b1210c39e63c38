"""Figures for the loggers that have them: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedssl.run import TrainerView


def has_pictures(trainer: TrainerView) -> bool:
    """Whether a logger of this rank can show pictures, so that they need to be drawn."""
    kinds = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return trainer.is_global_zero and any(isinstance(logger, kinds) for logger in trainer.loggers)


def show_figure(trainer: TrainerView, name: str, figure: Figure) -> None:
    """Log a matplotlib figure for the current round.

    Args:
        trainer: The trainer of the run.
        name: The picture's tag; MLflow stores ``NAME/round_00007.png``.
        figure: The figure.
    """
    number = trainer.round_index
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, number, close=False)
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], number)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{name}/round_{number:05}.png")
