from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_fedssl.callbacks.metric_matrices import draw_matrix, write_matrix


def cells(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_matrix_shows_counts_in_full_and_shares_with_two_digits(tmp_path: Path) -> None:
    counts = torch.tensor([[1234567, 2], [0, 7654321]])
    assert cells(draw_matrix(counts, ("a", "b"), "m")) == ["1234567", "2", "0", "7654321"]
    shares = torch.tensor([[2 / 3, 1 / 3], [float("nan"), 1.0]])
    assert cells(draw_matrix(shares, ("a", "b"), "m")) == ["0.67", "0.33", "nan", "1.00"]
    write_matrix(counts, ("a", "b"), tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text() == "true class,a,b\na,1234567,2\nb,0,7654321\n"


def test_a_matrix_that_is_not_classes_by_classes_has_numbered_columns(tmp_path: Path) -> None:
    """Such as the five counts of each class of ``MulticlassStatScores``."""
    matrix = torch.arange(6).reshape(2, 3)
    write_matrix(matrix, ("a", "b"), tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text() == "true class,0,1,2\na,0,1,2\nb,3,4,5\n"
