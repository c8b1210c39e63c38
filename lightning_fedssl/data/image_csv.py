"""CSV files that list image files, one to a row."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CsvRow = Mapping[str, str | None]
"""The values of a row by the names of the columns; None where the row is too short."""


def read_image_csv(
    path: Path, folder: Path, columns: Mapping[str, str], file_column: str, key: str
) -> Iterator[tuple[str, CsvRow]]:
    """The rows of a CSV file in UTF-8, each with its place for messages: the file and the number of the line.

    Args:
        path: The CSV file.
        folder: The folder that file names are relative to.
        columns: The columns that it must have; each with what a message adds about it, or with nothing.
        file_column: The column of the file names.
        key: How a message begins.

    Raises:
        ValueError: If a column is missing, a row has too many values, two rows list one file, or the text cannot be
            read; the message names the lines.
    """
    lines: dict[str, int] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            _check_columns(list(rows.fieldnames or []), columns, f"{key}: {str(path)!r}")
            for row in rows:
                place = f"{key}: {str(path)!r}, line {rows.line_num}"
                _check_fields(row, place)
                name = (row[file_column] or "").strip()
                first = lines.setdefault(os.path.normpath(folder / name), rows.line_num) if name else rows.line_num
                if first != rows.line_num:
                    raise ValueError(
                        f"{key}: {str(path)!r}, lines {first} and {rows.line_num}: both list {name!r}, but an image "
                        "has one row; keep one of the two"
                    )
                yield place, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{key}: {str(path)!r} is no CSV file in UTF-8 ({error})") from error


def _check_columns(found: Sequence[str], wanted: Mapping[str, str], place: str) -> None:
    missing = [f"{column!r}{note and f' ({note})'}" for column, note in wanted.items() if column not in found]
    if missing:
        raise ValueError(f"{place} has no column {', '.join(missing)}; {_described(found)}")


def _described(found: Sequence[str]) -> str:
    """The names of the columns of a CSV file, or why there are none."""
    if not found:
        return "the file is empty"
    separator = next((name for sign, name in ((";", "semicolons"), ("\t", "tabs")) if sign in found[0]), None)
    if len(found) == 1 and separator:
        return f"its columns are separated by {separator}: separate them by commas"
    return f"there are {', '.join(found)}"


def _check_fields(row: Mapping[Any, Any], place: str) -> None:
    """Refuse a row with more values than the first line has columns; empty fields at its end may be."""
    extra = [value for value in row.get(None, []) if value.strip()]
    if extra:
        raise ValueError(
            f"{place}: {extra[0]!r} is beyond the last column: quote a value that contains a comma, or remove the "
            "extra one"
        )
