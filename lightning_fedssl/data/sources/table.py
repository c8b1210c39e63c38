"""Tables with numeric and categorical columns in a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_fedssl.data.datasets import shortened
from lightning_fedssl.data.sources.arrays import Datasets, as_dataset
from lightning_fedssl.data.sources.base import read_csv

_EMPTY = ("", "NA", "N/A", "n/a", "NULL", "null", "None")
"""Values that stand for a missing number, beside nan."""


class Table(Datasets):
    """Rows of a CSV file with a head: ``--data.dataset patients.csv``, or ``--data.dataset Table``
    with options.

    Missing values of numeric columns become the median; categorical columns are one-hot encoded, a
    category that no training row has as zeros. scikit-learn's transformers are fitted on all
    training rows, those of the clients included: a real federation would exchange medians and
    categories for it. ``data.normalize`` then standardises every column. A row without a label is a
    training row without a label, which only clients get.

    Args:
        csv_file: The CSV file, UTF-8.
        label_column: Column of the classes' names; the classes are in sorted order.
        client_column: Column of the clients' identifiers, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`; no identifiers if left
            out.
        split_column: Column with train, test or validation; if left out, of every class each fifth
            row is a test row.
        numeric: The numeric columns; if left out, those whose values are all numbers or empty (NA,
            null, nan, ...).
        categorical: The categorical columns; if left out, all others.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a column is missing, or a value does not fit; the message names it.
    """

    def __init__(
        self,
        csv_file: str,
        label_column: str = "label",
        client_column: str | None = None,
        split_column: str | None = None,
        numeric: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
    ) -> None:
        special = [column for column in (label_column, client_column, split_column) if column]
        rows = read_csv(csv_file, [*special, *(numeric or ()), *(categorical or ())])
        table = {
            column: np.array([row[column] for row in rows], dtype=object)
            for column in (rows[0] if rows else special)
        }
        classes = sorted(set(table[label_column]) - {""})
        labels = np.array([classes.index(label) if label else -1 for label in table[label_column]])
        place = table[split_column].copy() if split_column else _every_fifth(labels)
        place[(place == "train") & (labels < 0)] = "unlabeled"
        found = sorted(set(place))
        if not {"train", "test"} <= set(found) <= {"train", "test", "unlabeled", "validation"}:
            raise ValueError(
                f"data.dataset: {csv_file!r} needs rows of train and of test, and no others than "
                "of unlabeled and "
                f"validation; there are {shortened(', '.join(found))}"
            )
        if numeric is None:
            numeric = [
                c
                for c in table
                if c not in [*special, *(categorical or ())] and _numbers(table[c]) is not None
            ]
        if categorical is None:
            categorical = [column for column in table if column not in [*special, *numeric]]
        features = _encode(table, numeric, categorical, np.isin(place, ["train", "unlabeled"]))
        samples = {
            part: as_dataset((features[place == part], labels[place == part])) for part in found
        }
        owners = {
            p: [name or None for name in table[client_column][place == p]]
            for p in found
            if client_column
        }
        parts: Any = [samples.get(part) for part in ("train", "test", "unlabeled", "validation")]
        parts += [owners.get(part) for part in ("train", "test", "unlabeled")]
        parts.append(classes)
        super().__init__(*parts)


def _encode(table: Any, numeric: Sequence[str], categorical: Sequence[str], training: Any) -> Any:
    """The features of every row, float32 ``(rows, features)``.

    The transformers are fitted on the training rows.
    """
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder

    features = []
    if numeric:
        columns = [_numbers(table[column]) for column in numeric]
        if wrong := [name for name, column in zip(numeric, columns, strict=True) if column is None]:
            raise ValueError(
                f"data.dataset: a value of the numeric column {wrong[0]!r} is no number"
            )
        values = np.stack(columns, axis=1)
        if infinite := np.argwhere(np.isinf(values)).tolist():
            row, column = infinite[0]
            raise ValueError(
                f"data.dataset: row {row + 2} has an infinite {numeric[column]!r}; correct or "
                "empty it"
            )
        features.append(
            SimpleImputer(strategy="median", keep_empty_features=True)
            .fit(values[training])
            .transform(values)
        )
    if categorical:
        words = np.stack([table[column] for column in categorical], axis=1)
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(words[training])
        features.append(encoder.transform(words))
    return np.concatenate(features, axis=1).astype(np.float32)


def _numbers(values: Any) -> Any:
    """A column as float64, NaN for a missing value; None if a value is no number."""
    try:
        return np.array([np.nan if value in _EMPTY else float(value) for value in values])
    except ValueError:
        return None


def _every_fifth(labels: Any) -> Any:
    """The part of every row: of every class each fifth is a test row."""
    parts = np.full(len(labels), "train", dtype=object)
    for label in range(int(labels.max(initial=-1)) + 1):
        parts[np.flatnonzero(labels == label)[4::5]] = "test"
    return parts
