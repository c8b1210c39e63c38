"""The commands that list what the package contains: methods, configs, suites, datasets, partitions,
availability. They need neither PyTorch nor Lightning.
"""

from __future__ import annotations

import json
from pathlib import Path

from lightning_fedssl.cli.commands import LISTS

FILE = Path(__file__).with_name("lists.json")
"""What can be named, each with a line about it, by command. ``docs/build_lists.py`` writes it."""


def rows_of(kind: str) -> dict[str, str]:
    """Names and one line about each.

    Args:
        kind: A key of :data:`~lightning_fedssl.cli.commands.LISTS`.
    """
    rows: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    return rows


def show(kind: str) -> str:
    """The list as text, one name per line, with a hint how to use a name.

    Args:
        kind: A key of :data:`~lightning_fedssl.cli.commands.LISTS`.
    """
    rows = rows_of(kind)
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {rows[name]}".rstrip() for name in sorted(rows)]
    return "\n".join([*lines, "", LISTS[kind], ""])
