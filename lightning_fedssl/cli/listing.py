"""The commands that list what the package contains: methods, configs, suites, datasets, partitions,
availability.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli.config_files import CONFIGS, package_files
from lightning_fedssl.cli.public import public_classes
from lightning_fedssl.data.datasets import IMAGE_FOLDER, SPECS
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.sources.base import DataSource
from lightning_fedssl.system import Availability

Rows = Iterator[tuple[str, str]]
"""Names, each with a line about it."""

_SENTENCE = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bApp)(?<!\bal)\. |: ")
"""The end of the first sentence of a comment; the full stop of an abbreviation does not count."""


def rows_of(kind: str) -> list[tuple[str, str]]:
    """Names and one line about each.

    Args:
        kind: A key of :data:`COMMANDS`.
    """
    return sorted(COMMANDS[kind][1]())


def show(kind: str) -> str:
    """The list as text, one name per line, with a hint how to use a name.

    Args:
        kind: A key of :data:`COMMANDS`.
    """
    rows = rows_of(kind)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {line}".rstrip() for name, line in rows]
    return "\n".join([*lines, "", COMMANDS[kind][0], ""])


def _classes(base: type) -> Rows:
    """The public classes that derive from a base class,
    each with the first line of its docstring.
    """
    for name, found in public_classes().items():
        if not isinstance(found, type) or found is base or inspect.isabstract(found):
            continue
        if issubclass(found, base):
            yield name, (found.__doc__ or "").partition("\n")[0].replace("``", "")


def _datasets() -> Rows:
    yield from _classes(DataSource)
    for name, spec in SPECS.items():
        yield name, f"{spec.num_classes} classes, shape {' x '.join(map(str, spec.in_shape))}"
    yield IMAGE_FOLDER, "a folder of your own: root/train/<class>/ and root/test/<class>/"


def _files(folder: Path = CONFIGS) -> Rows:
    """Files of the package with the comment at the top of each, up to its first full stop or
    colon.
    """
    for name, path in package_files(folder).items():
        if not name.startswith("suites/"):
            comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
            words = comment[0].replace("#", " ").split() if comment else []
            yield name, _SENTENCE.split(" ".join(words))[0].rstrip(".")


COMMANDS: dict[str, tuple[str, Callable[[], Rows]]] = {
    "methods": (
        "use: --model NAME; its keys: lightning-fedssl fit --model.help NAME",
        lambda: _classes(FederatedAlgorithm),
    ),
    "configs": ("use: --config NAME; several are merged in order", _files),
    "suites": ("use: lightning-fedssl compare NAME", lambda: _files(CONFIGS / "suites")),
    "datasets": (
        "use: --data.dataset NAME; options of a class: --data.dataset.OPTION VALUE",
        _datasets,
    ),
    "partitions": (
        "use: --data.partition NAME; its keys: lightning-fedssl fit --data.partition.help NAME",
        lambda: _classes(Partition),
    ),
    "availability": (
        "use: --trainer.faults.availability NAME; keys: lightning-fedssl fit "
        "--trainer.faults.availability.help NAME",
        lambda: _classes(Availability),
    ),
}
"""The listing commands: a hint how to use a name, and the function that finds the rows."""
