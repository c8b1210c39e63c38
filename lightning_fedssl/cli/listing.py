"""The commands that list what the package contains: methods, configs, suites, datasets, partitions,
availability. They need neither PyTorch nor Lightning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_fedssl.cli.config_files import CONFIGS, package_files

CLASSES = Path(__file__).with_name("classes.json")
"""What can be named of the package's classes and data sets, each with a line about it, by command.
``docs/build_stubs.py`` writes it."""

COMMANDS = {
    "methods": "use: --model NAME; its keys: lightning-fedssl fit --model.help NAME",
    "configs": "use: --config NAME; several are merged in order",
    "suites": "use: lightning-fedssl compare NAME",
    "datasets": "use: --data.dataset NAME; options of a class: --data.dataset.OPTION VALUE",
    "partitions": (
        "use: --data.partition NAME; its keys: lightning-fedssl fit --data.partition.help NAME"
    ),
    "availability": (
        "use: --trainer.faults.availability NAME; keys: lightning-fedssl fit "
        "--trainer.faults.availability.help NAME"
    ),
}
"""The listing commands, each with a hint how to use a name."""

_SENTENCE = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bApp)(?<!\bal)\. |: ")
"""The end of the first sentence of a comment; the full stop of an abbreviation does not count."""


def rows_of(kind: str) -> dict[str, str]:
    """Names and one line about each.

    Args:
        kind: A key of :data:`COMMANDS`.
    """
    if kind in ("configs", "suites"):
        return dict(_files(CONFIGS / "suites" if kind == "suites" else CONFIGS))
    rows: dict[str, str] = json.loads(CLASSES.read_text(encoding="utf-8"))[kind]
    return rows


def show(kind: str) -> str:
    """The list as text, one name per line, with a hint how to use a name.

    Args:
        kind: A key of :data:`COMMANDS`.
    """
    rows = rows_of(kind)
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {rows[name]}".rstrip() for name in sorted(rows)]
    return "\n".join([*lines, "", COMMANDS[kind], ""])


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Files of the package with the comment at the top of each, up to its first full stop or
    colon.
    """
    for name, path in package_files(folder).items():
        if not name.startswith("suites/"):
            comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
            words = comment[0].replace("#", " ").split() if comment else []
            yield name, _SENTENCE.split(" ".join(words))[0].rstrip(".")
