"""Tables with numeric and categorical columns in a CSV file."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from lightning_fedssl.data.datasets import is_fifth, shortened
from lightning_fedssl.data.sources.arrays import Datasets
from lightning_fedssl.data.sources.base import (
    THOUSANDS,
    LoadedData,
    Row,
    client_of,
    part_of,
    read_csv,
)
from lightning_fedssl.data.sources.reading import MISSING, NO_LABEL, UNKNOWN, Reading, cut
from lightning_fedssl.data.table_rows import (
    Input,
    encode,
    inputs_of_numbers,
    inputs_of_words,
    number,
)
from lightning_fedssl.functional.frozen import listed

_CLIENTS_OF = {
    "train": "client_ids",
    "test": "test_client_ids",
    "unlabeled": "unlabeled_client_ids",
}
_PARTS = ("train", "test", "unlabeled", "validation")

_NAMELESS = re.compile(r"|Unnamed: \d.*|\.\.\.\d+")
"""What spreadsheets, pandas and R write above row numbers."""

_ALMOST_A_NUMBER = re.compile(r"[<>≤≥~]?\s*[-+\u2212]?\d+([.,' \u00a0]\d+)*\s*%?")
"""Numbers with separators, limits or percent signs."""

_CODE = re.compile(r"0\d+|\d{16,}")
"""What no number is: with a leading zero, as in postal codes, or longer than 64 bits hold."""

_DRESSED = re.compile(r"\d+([-/])\d\d?\1\d+([T ]\d.*)?|[-+]?\d+([.,]\d+)?\s*[^\W\d]+")
"""Dates, and numbers with a unit."""

_SENTINELS = (-9, -99, -999, -9999)
"""Numbers that stand for a missing value in columns without other negative ones."""

_LEAST_DIFFERENT = 20
"""The smallest number of values that can look like an identifier by all being different."""


class Table(Datasets):
    """Rows of a CSV file with a head: ``--data.dataset patients.csv``, or ``--data.dataset Table``
    with options.

    Missing values of numeric columns become the median; categorical columns are one-hot encoded, a
    category that no training row has as zeros. Medians and categories are those of all training
    rows, those of the clients included: a real federation would exchange them for it, or take the
    server's. They belong to the exported model, which so takes new rows
    (:meth:`~lightning_fedssl.export.LoadedNetwork.predict`). ``data.normalize`` then standardises
    every column. A row without a label (empty, NA, nan, None, ? or -1) is a training row without a
    label, which only clients get.

    Args:
        csv_file: The CSV file, UTF-8. Columns without a name or a value are left out.
        label_column: Column of the classes' names; the classes are in sorted order.
        label_columns: In place of it, a column for each class with 0 or 1 (``data.task:
            MultiLabel``), or columns of numbers to predict (``Regression``).
        client_column: Column of the clients' identifiers, for
            :class:`~lightning_fedssl.data.partition.natural.NaturalClients`; no identifiers if left
            out.
        split_column: Column with train, test, validation (or val) or unlabeled; if left out, of
            every class each fifth row is a test row.
        numeric: The numeric columns; if left out, those with numbers in most cells. A warning names
            the other cells: they are missing values, as empty ones (NA, null, nan, ...) are.
        categorical: The categorical columns; if left out, all others.
        ignore: Columns that are left out.
        strict: Whether other cells of numeric columns are refused.

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
        ignore: Sequence[str] = (),
        strict: bool = False,
        label_columns: Sequence[str] = (),
    ) -> None:
        of_labels = [*label_columns] or [label_column]
        special = [*of_labels, *filter(None, (client_column, split_column))]
        requested = {"ignore": ignore, "numeric": numeric, "categorical": categorical}
        rows = read_csv(
            csv_file, [*special, *chain(*filter(None, requested.values()))], self.reading
        )
        if label_columns:
            classes = of_labels
            labels = label_numbers(rows, label_columns, csv_file)
            strata = np.where(np.isnan(labels).all(axis=1), -1, 0)
        else:
            words = [row[label_column] for row in rows]
            classes = sorted({*words} - NO_LABEL)
            numbers = dict.fromkeys(NO_LABEL, -1)
            numbers |= {name: number for number, name in enumerate(classes)}
            labels = strata = np.array([numbers[word] for word in words])
        part_of_row = np.where(is_fifth(strata), "test", "train").astype(object)
        if split_column:
            part_of_row = np.array([part_of(row[split_column]) for row in rows], dtype=object)
        if not {"train", "test"} <= (named := set(part_of_row)) <= set(_PARTS):
            raise ValueError(
                f"data.dataset: {csv_file!r} needs rows of train and of test, and no others than "
                f"of unlabeled and validation; there are {shortened(', '.join(sorted(named)))} "
                f"(numbers to predict are named by label_columns: [{label_column}]; without "
                "split_column each fifth row of every class is a test row)"
            )
        for row, part in zip(rows, part_of_row, strict=True):
            needed = client_column
            if part in ("test", "validation"):
                needed = None if label_columns else label_column
            if needed and row[needed] in (UNKNOWN if needed == client_column else NO_LABEL):
                raise ValueError(
                    f"data.dataset: {csv_file!r}, row {row.number}: a row of {part} needs a value "
                    f"of {needed}; complete or remove it"
                )
        for name in of_labels:
            if label_columns:
                _Column(name, rows, requested).warn_of_doubts(self.reading)
            _warn_of_no_label(name, rows, MISSING if label_columns else NO_LABEL, self.reading)
        columns = [_Column(name, rows, requested) for name in rows[0] if name not in special]
        _report(columns, strict, self.reading)
        self._prepare(columns, labels, np.isin(part_of_row, ["train", "unlabeled"]))
        self.label_column = "" if label_columns else label_column
        features = encode({column.full_name: column.cells for column in columns}, self.inputs)
        parts: dict[str, Any] = {"class_names": classes}
        for part in sorted(named):
            lines = np.flatnonzero(part_of_row == part)
            parts[part] = features[lines], labels[lines]
            if client_column and part in _CLIENTS_OF:
                parts[_CLIENTS_OF[part]] = [client_of(rows[line][client_column]) for line in lines]
        super().__init__(**parts)

    def _prepare(self, columns: Sequence[_Column], labels: Any, training: Any) -> None:
        """Decides how features become numbers, from the training rows, numeric columns first."""
        used = [column for column in columns if column.kind in ("numeric", "categorical")]
        for column in used:
            values = column.numbers if column.kind == "numeric" else column.cells.astype(str)
            self.reading.warn_of_column(column.name, values, labels)
        self.fitted = tuple(
            f"the median or the categories of {column.name}"
            for column in used
            if column.kind == "categorical" or np.isnan(column.numbers).any()
        )
        used.sort(key=lambda column: column.kind != "numeric")
        self.feature_names = [column.name for column in used if column.kind == "numeric"]
        self.inputs = [each for column in used for each in column.inputs(training)]

    def load(self) -> LoadedData:
        """Read the rows, and add to the specification how they become numbers."""
        loaded = super().load()
        spec = replace(loaded.spec, inputs=(*self.inputs,), label_column=self.label_column)
        return loaded._replace(spec=spec)


class _Column:
    """A column of features.

    Attributes:
        name: Its name as messages show it.
        full_name: Its name in the file.
        cells: The text of each row.
        lines: The number of each row in the file.
        missing: Whether a row has no value.
        numbers: The values as float64, NaN for cells without a finite number.
        odd: The rows whose cells are neither such numbers nor missing.
        kind: ``numeric``, ``categorical``, or why it is left out.
    """

    def __init__(
        self, name: str, rows: Sequence[Row], requested: Mapping[str, Sequence[str] | None]
    ) -> None:
        self.name = cut(name)
        self.full_name = name
        self.cells = np.array([row[name] for row in rows], dtype=object)
        self.lines = [row.number for row in rows]
        self.missing = np.isin(self.cells, list(MISSING))
        self.cells[self.missing] = ""
        self.numbers = np.array(list(map(number, self.cells)))
        self.odd = np.flatnonzero(np.isnan(self.numbers) & ~self.missing).tolist()
        kinds = [kind for kind, names in requested.items() if name in (names or ())]
        self.kind = kinds[0] if kinds else self._own_kind(name, requested)

    def _own_kind(self, name: str, requested: Mapping[str, Sequence[str] | None]) -> str:
        if not any(self.cells):
            return "no value"
        if _NAMELESS.fullmatch(name):
            return "no name"
        words = [row for row in self.odd if not _ALMOST_A_NUMBER.fullmatch(self.cells[row])]
        codes = any(map(_CODE.fullmatch, self.cells))
        if requested["numeric"] is None and not codes and 2 * len(words) < (~self.missing).sum():
            return "numeric"
        return "categorical" if requested["categorical"] is None else "not chosen"

    def inputs(self, training: Any) -> list[Input]:
        """How its cells become numbers.

        Args:
            training: Whether each row is one for training, from which median and categories are.
        """
        if self.kind == "numeric":
            return inputs_of_numbers(self.full_name, self.numbers[training])
        return inputs_of_words(self.full_name, self.cells[training])

    def check_numbers(self, strict: bool, reading: Reading) -> None:
        """Names the cells of a numeric column that are not numbers.

        Raises:
            ValueError: If most cells are not numbers, or ``strict``.
        """
        if not self.odd:
            return
        text = (
            f"{self.name}: {len(self.odd)} of {len(self.cells)} cells are not numbers: "
            f"{cut(self.cells[self.odd[0]])!r} in row {self.lines[self.odd[0]]}"
        )
        if strict or 2 * len(self.odd) >= (~self.missing).sum():
            raise ValueError(
                f"data.dataset: {text}; correct or empty them, or give categorical or ignore: "
                f"[{self.name}]"
            )
        reading.warn(f"{text}; they count as missing")

    def warn_of_doubts(self, reading: Reading) -> None:
        """Say what some numbers of a numeric column may mean, with the first such cell."""
        numbers = self.numbers[~np.isnan(self.numbers)]
        rest = numbers[~np.isin(numbers, _SENTINELS)]
        if len(rest) < len(numbers) and len(set(rest)) > 1 and rest.min() >= 0:
            rows = np.isin(self.numbers, _SENTINELS)
            meaning = "missing values? empty these cells"
        else:
            rows = np.array(["." in cell for cell in self.cells])
            meaning = "thousands with a dot? remove the dots"
            if rows.all() or not all(map(THOUSANDS.fullmatch, self.cells[rows])):
                return
        if rows.any():
            first = rows.argmax()
            reading.warn(
                f"{self.name}: cells like {self.cells[first]!r} in row {self.lines[first]} "
                f"({rows.sum()} in all): {meaning}"
            )

    def warn_of_categories(self, reading: Reading) -> None:
        """Say which categories may be one, and which are dates or numbers with a unit."""
        cells = self.cells[~self.missing]
        reading.warn_of_names(f"categories of {self.name}", sorted(set(cells)))
        dressed = np.array([bool(_DRESSED.fullmatch(cell)) for cell in self.cells])
        if 2 * dressed.sum() > len(cells):
            first = dressed.argmax()
            reading.warn(
                f"{self.name}: cells like {self.cells[first]!r} in row {self.lines[first]} are "
                "categories without an order: write numbers, such as days or amounts without a "
                "unit, where order matters"
            )

    def looks_like_identifier(self) -> bool:
        """Whether values never fall from row to row, as dates do; most words differ; or numbers
        all differ and are whole or in equal steps.
        """
        words = self.kind == "categorical"
        values = self.cells[~self.missing] if words else self.numbers[~np.isnan(self.numbers)]
        different = len(set(values))
        if len(values) < _LEAST_DIFFERENT:
            return False
        if different >= _LEAST_DIFFERENT and (values[1:] >= values[:-1]).all():
            return True
        if words:
            return 2 * different > len(values)
        steps = np.diff(values)
        regular = np.array_equal(values, values.round()) or np.allclose(steps, steps[0])
        return regular and different == len(values)


def _warn_of_no_label(
    name: str, rows: Sequence[Row], words: Collection[str], reading: Reading
) -> None:
    """Says how many rows a word has no label, such as NA: not an empty cell, which is meant so."""
    empty = [row for row in rows if row[name] in NO_LABEL and row[name]]
    if empty and empty[0][name] in words:
        reading.warn(
            f"{cut(name)}: rows without a label are {len(empty)} of {len(rows)}: "
            f"{empty[0][name]!r} in row {empty[0].number}"
        )


def label_numbers(rows: Sequence[Row], columns: Sequence[str], path: str) -> Any:
    """The numbers in several label columns, float64 ``(rows, columns)``, NaN where there is none.

    Args:
        rows: The rows.
        columns: The columns.
        path: The file, for the message.

    Raises:
        ValueError: Names the first cell that holds something else.
    """
    for row in rows:
        for name in columns:
            if row[name] not in MISSING and math.isnan(number(row[name])):
                raise ValueError(
                    f"data.dataset: {path!r}, row {row.number}: {cut(row[name])!r} in the label "
                    f"column {cut(name)} is not a number; give 0 or 1, or a number to predict"
                )
    return np.array([[number(row[name]) for name in columns] for row in rows])


def _report(columns: Sequence[_Column], strict: bool, reading: Reading) -> None:
    """Completes the report by the columns, and refuses those that are not features."""
    described: dict[str, list[str]] = {"numeric": [], "categorical": [], "left out": []}
    missing = []
    constant: list[str] = []
    for column in columns:
        kind = column.kind
        name = column.name
        values = set(column.cells)
        if kind not in described:
            described["left out"].append(f"{name!r} ({kind})")
            continue
        if {"train", "test"} <= set(map(part_of, values)):
            raise ValueError(
                f"data.dataset: the column {name} names parts of the data: give split_column: "
                f"{name} or ignore: [{name}]"
            )
        if kind == "numeric":
            column.check_numbers(strict, reading)
            column.warn_of_doubts(reading)
        if kind == "categorical":
            column.warn_of_categories(reading)
        if len(values) == 1:
            constant.append(name)
        if column.looks_like_identifier():
            reading.warn(
                f"{name}: {len(values)} different values in {len(column.cells)} rows, as of a "
                "time (which needs a split_column), an identifier or a row number; leave it out by "
                f"ignore: [{name}] if it is one"
            )
        described[kind].append(name if kind == "numeric" else f"{name} ({len(values)} values)")
        if absent := column.missing.sum() + (len(column.odd) if kind == "numeric" else 0):
            missing.append(f"{name} {absent}")
    if not described["numeric"] + described["categorical"]:
        raise ValueError("data.dataset: the table has no column of features")
    texts = (f"{kind} {listed(names)}" for kind, names in described.items() if names)
    reading.facts["columns"] = "; ".join(texts)
    if missing:
        reading.facts["missing values"] = listed(missing)
    if constant:
        reading.warn(f"columns with one value in all rows, which say nothing: {listed(constant)}")
