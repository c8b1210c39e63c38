"""Figures, pictures, texts and histograms for the loggers that have them: TensorBoard, Weights &
Biases and MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure
    from torch import Tensor

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


def show_histogram(trainer: Run, name: str, values: Tensor) -> None:
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


def _loggers(trainer: Run) -> list[Any]:
    return list(trainer.loggers) if trainer.is_global_zero else []


def draw_clients(rounds: dict[int, dict[int, float]], num_clients: int, title: str) -> Figure:
    """A heat map of a value over clients (rows) and rounds (columns).

    White where a client has no value.

    Args:
        rounds: The clients' values by round.
        num_clients: M.
        title: What the value is.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    table = torch.full((num_clients, max(rounds)), torch.nan)
    for number, values in rounds.items():
        for client, value in values.items():
            table[client, number - 1] = value
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    extent = (0.5, max(rounds) + 0.5, num_clients - 0.5, -0.5)
    picture = axes.imshow(table.numpy(), aspect="auto", interpolation="nearest", extent=extent)
    axes.set(xlabel="round", ylabel="client", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.colorbar(picture)
    return figure
