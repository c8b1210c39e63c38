"""The rows of a table as the numbers that a network takes: by a preparation that a model keeps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data.sources.reading import MISSING, cut

_log = logging.getLogger(__name__)

Input = dict[str, Any]
"""One number that a network takes: ``{"column": NAME, "fill": NUMBER}`` is that of a column, or the
fill value where it has none; ``{"column": NAME, "level": TEXT}`` is 1 where the cell is this text,
else 0."""

_LARGEST = float(np.finfo(np.float32).max)


def number(cell: str) -> float:
    """The number of a cell, or NaN if it has none that is finite in 32 bits."""
    try:
        return float(cell) if abs(float(cell)) <= _LARGEST and "_" not in cell else math.nan
    except ValueError:
        return math.nan


def inputs_of_numbers(column: str, numbers: Any) -> list[Input]:
    """The input of a numeric column, filled with the median.

    Args:
        column: Its name.
        numbers: Those of the training rows, NaN for none.
    """
    present = numbers[~np.isnan(numbers)]
    return [{"column": column, "fill": float(np.median(present)) if len(present) else 0.0}]


def inputs_of_words(column: str, cells: Any) -> list[Input]:
    """The inputs of a categorical column: one for each text, in sorted order.

    Args:
        column: Its name.
        cells: The texts of the training rows, empty for a missing one.
    """
    return [{"column": column, "level": level} for level in sorted(set(cells))]


def encode(columns: Mapping[str, Any], inputs: Sequence[Input]) -> Any:
    """The inputs of rows, float64 ``(rows, inputs)``.

    Args:
        columns: The cells of each column as texts, empty for a missing one.
        inputs: The inputs.
    """
    numbers = {each["column"] for each in inputs if "fill" in each}
    values = {name: np.array([number(cell) for cell in columns[name]]) for name in numbers}
    features = []
    for each in inputs:
        name = each["column"]
        if "level" in each:
            features.append(columns[name] == each["level"])
        else:
            features.append(np.where(np.isnan(values[name]), each["fill"], values[name]))
    return np.stack(features, axis=1).astype(np.float64)


def encode_rows(rows: Sequence[Mapping[str, Any]], inputs: Sequence[Input]) -> Tensor:
    """The inputs of new rows, float64 ``(rows, inputs)``; warns of categories that are not known.

    Args:
        rows: The cells by the names of their columns: texts, numbers, or None for a missing one;
            other columns play no part.
        inputs: The inputs of the model.

    Raises:
        ValueError: If a column is missing; the message names it.
    """
    names = dict.fromkeys(each["column"] for each in inputs)
    columns = {}
    for name in names:
        if missing := [place for place, row in enumerate(rows) if name not in row]:
            raise ValueError(
                f"row {missing[0]} has no column {cut(name)!r}, which the model was trained with; "
                "give it, empty where the value is not known"
            )
        columns[name] = np.array([_text(row[name]) for row in rows], dtype=object)
    encoded = torch.from_numpy(encode(columns, inputs))
    for name in names:
        levels = {each["level"] for each in inputs if each["column"] == name and "level" in each}
        unknown = [cell for cell in columns[name] if cell not in levels] if levels else []
        if unknown:
            _log.warning(
                "%s: %d of %d cells have no category of training, such as %r; they count as none",
                cut(name), len(unknown), len(rows), cut(unknown[0]),
            )  # fmt: skip
    return encoded


def _text(value: Any) -> str:
    """A cell as the text that a CSV file has, empty for a missing one."""
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as data frames have whole numbers beside missing ones
    text = str(value).strip()
    return "" if text in MISSING else text
