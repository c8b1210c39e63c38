"""Writes evaluation metrics that are matrices,
such as the confusion matrix, as figures and tables.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import has_pictures, show_figure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure
    from torch import Tensor

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import Run


class MetricMatrices(FederatedCallback):
    """Writes every evaluation metric that is a matrix: a figure in the logger, and a CSV file in
    the run folder.

    Part of every run; without such a metric in ``trainer.metrics`` it does nothing. The file, for
    example ``val_confusion_matrix.csv``, contains the matrix of the last evaluation, with a row for
    each true class.
    """

    def on_evaluation_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, metrics: dict[str, float]
    ) -> None:
        """Write the matrices of this evaluation."""
        stage = evaluated_on(metrics)
        matrices = {
            n: m
            for n, m in trainer.metric_values.items()
            if m.dim() == 2 and n.startswith(f"{stage}/")
        }
        if trainer.is_global_zero:
            for name, matrix in matrices.items():
                show_matrix(trainer, name, matrix)


def evaluated_on(metrics: Iterable[str]) -> Literal["val", "test"]:
    """Whether the metrics of an evaluation are those of the test images or of the validation
    images.

    Args:
        metrics: Their names. A method's own steps determine which there are, so that ``test/loss``
            may be missing.
    """
    return "test" if any(name.startswith("test") for name in metrics) else "val"


def show_matrix(trainer: Run, name: str, matrix: Tensor) -> None:
    """Write a matrix into the run folder, and as a figure to every logger that has pictures.

    Args:
        trainer: The trainer of the run, on rank 0.
        name: The figure's tag; in the file's name ``/`` becomes ``_``.
        matrix: ``(classes, classes)``, on the CPU.
    """
    names = trainer.datamodule.spec.class_names
    if trainer.log_dir:
        write_matrix(matrix, names, Path(trainer.log_dir) / f"{name.replace('/', '_')}.csv")
    if has_pictures(trainer):
        show_figure(trainer, name, draw_matrix(matrix, names, name))


def write_matrix(matrix: Tensor, names: tuple[str, ...], path: Path) -> None:
    """Write a matrix as CSV, with the names of the classes as header and as first column.

    Args:
        matrix: ``(classes, classes)``; a side of another length has numbers instead of names.
        names: The classes' names.
        path: The file.
    """
    of_rows, of_columns = (_names_of(size, names) for size in matrix.shape)
    rows = [
        [name, *(f"{value:.10g}" for value in row)]
        for name, row in zip(of_rows, matrix.tolist(), strict=True)
    ]
    corner = "true class" if of_rows == names else "row"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([[corner, *of_columns], *rows])


def draw_matrix(matrix: Tensor, names: tuple[str, ...], title: str) -> Figure:
    """A matplotlib figure of a matrix: true classes (rows) by predicted classes (columns), numbers
    up to 20 classes.

    Args:
        matrix: ``(classes, classes)``; a side of another length has numbers instead of names.
        names: The classes' names.
        title: The title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    # Without limits, a matrix of zeros would have the colour of the middle.
    finite = matrix.double().nan_to_num(0.0, 0.0, 0.0)
    low, high = min(0.0, float(finite.min())), float(finite.max()) or 1.0
    picture = axes.imshow(matrix.numpy(), cmap="Blues", vmin=low, vmax=high)
    of_rows, of_columns = (_names_of(size, names) for size in matrix.shape)
    axes.set(
        xlabel="predicted class" if of_columns == names else "column",
        ylabel="true class" if of_rows == names else "row",
        title=title,
    )
    if max(matrix.shape) <= 20:
        axes.set_xticks(range(len(of_columns)), of_columns, rotation=45, ha="right")
        axes.set_yticks(range(len(of_rows)), of_rows)
        size = 9 if max(matrix.shape) <= 10 else 5
        for (row, column), value in np.ndenumerate(matrix.numpy()):
            color, text = (
                "white" if value > high / 2 else "black",
                f"{value:.2f}".removesuffix(".00"),
            )
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=size)
    figure.colorbar(picture)
    return figure


def _names_of(size: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes for a side of a matrix with one entry per class, else numbers."""
    return names if size == len(names) else tuple(map(str, range(size)))
