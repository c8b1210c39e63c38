"""Figures, pictures, texts and histograms for the loggers that have them: TensorBoard, Weights &
Biases and MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure
    from torch import Tensor

    from lightning_fedssl.trainer import FederatedTrainer


def boards_of(trainer: FederatedTrainer) -> Iterator[TensorBoardLogger]:
    """The TensorBoard loggers of a trainer, on rank 0."""
    if trainer.is_global_zero:
        yield from (logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))


def has_pictures(trainer: FederatedTrainer) -> bool:
    """Whether a logger of this rank can show pictures, so that they need to be drawn."""
    kinds = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return trainer.is_global_zero and any(isinstance(logger, kinds) for logger in trainer.loggers)


def show_figure(trainer: FederatedTrainer, name: str, figure: Figure) -> None:
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


def show_text(trainer: FederatedTrainer, title: str, text: str) -> None:
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


def show_histogram(trainer: FederatedTrainer, name: str, values: Tensor) -> None:
    """Log a histogram for the current round, if there are values; MLflow has none.

    Args:
        trainer: The trainer of the run.
        name: The histogram's tag.
        values: ``(n,)``, on the CPU.
    """
    for logger in _loggers(trainer) if len(values) else ():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, trainer.round_index)
        elif isinstance(logger, WandbLogger):
            import wandb  # type: ignore[import-not-found, unused-ignore]

            histogram: Any = wandb.Histogram(values.tolist())
            logger.log_metrics({name: histogram}, trainer.round_index)


def _loggers(trainer: FederatedTrainer) -> list[Any]:
    return list(trainer.loggers) if trainer.is_global_zero else []
