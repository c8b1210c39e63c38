"""Writes evaluation metrics that are matrices,
such as the confusion matrix, as figures and tables.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import has_pictures, show_figure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure
    from torch import Tensor

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import Run


_MOST_NAMED = 20
"""The largest number of classes whose names and numbers are in the figure."""


class MetricMatrices(FederatedCallback):
    """Writes every evaluation metric that is a matrix: a figure in the logger, and a CSV file in
    the run folder.

    Part of every run; without such a metric in ``trainer.metrics`` it does nothing. The file, for
    example ``val_confusion_matrix.csv``, contains the matrix of the last evaluation, with a row for
    each true class.
    """

    def on_evaluation_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, metrics: Metrics
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
    """Write a matrix into the run folder, and one of classes by classes as a figure to every logger
    that has pictures.

    Args:
        trainer: The trainer of the run, on rank 0.
        name: The figure's tag; in the file's name ``/`` becomes ``_``.
        matrix: ``(classes, classes)``, on the CPU.
    """
    names = trainer.datamodule.spec.class_names
    if trainer.log_dir:
        write_matrix(matrix, names, Path(trainer.log_dir) / f"{name.replace('/', '_')}.csv")
    if has_pictures(trainer) and matrix.shape == (len(names), len(names)):
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
        matrix: ``(classes, classes)``.
        names: The classes' names.
        title: The title.
    """
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    figure = Figure(figsize=(5.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    is_whole = bool((matrix == matrix.round()).all())
    ConfusionMatrixDisplay(matrix.double().numpy(), display_labels=names).plot(
        ax=axes,
        cmap="Blues",
        include_values=len(names) <= _MOST_NAMED,
        values_format=".0f" if is_whole else ".2f",
        xticks_rotation=45,
    )
    axes.set(title=title)
    if len(names) > _MOST_NAMED:
        axes.set(xticks=[], yticks=[])
    return figure


def _names_of(size: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes for a side of a matrix with one entry per class, else numbers."""
    return names if size == len(names) else tuple(map(str, range(size)))
