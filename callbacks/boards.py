"""Figures and texts for the loggers that have them: TensorBoard, Weights &
Biases and MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

    from lightning_fedssl.run import Run


def boards_of(trainer: Run) -> Iterator[TensorBoardLogger]:
    """The TensorBoard loggers of a trainer, on rank 0."""
    if trainer.is_global_zero:
        yield from (logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))


def has_pictures(trainer: Run) -> bool:
    """Whether a logger of this rank can show pictures, so that they need to be drawn."""
    kinds = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return trainer.is_global_zero and any(isinstance(logger, kinds) for logger in trainer.loggers)


def show_figure(trainer: Run, name: str, figure: Figure) -> None:
    """Log a matplotlib figure for the current round.

    Args:
        trainer: The trainer of the run.
        name: The picture's tag; MLflow stores ``NAME/round_00007.png``.
        figure: The figure.
    """
    number = trainer.round_index
    for logger in _loggers(trainer):
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, number, close=False)
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [figure], number)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{name}/round_{number:05}.png")


def show_text(trainer: Run, title: str, text: str) -> None:
    """Log a text of the run.

    Args:
        trainer: The trainer of the run.
        title: What the text is; MLflow stores ``TITLE.md``.
        text: In Markdown.
    """
    for logger in _loggers(trainer):
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(title, text)
        elif isinstance(logger, WandbLogger):
            logger.log_text(title, columns=["text"], data=[[text]])
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, text, f"{title}.md")


def _loggers(trainer: Run) -> list[Any]:
    return list(trainer.loggers) if trainer.is_global_zero else []
