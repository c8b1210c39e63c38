"""The commands that list what the package contains: methods, configs, suites, datasets, partitions,
availability.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli.config_files import CONFIGS, package_files
from lightning_fedssl.cli.public import public_classes
from lightning_fedssl.data.datasets import IMAGE_FOLDER, SPECS
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.sources.base import DataSource
from lightning_fedssl.system import Availability

_SENTENCE = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bApp)(?<!\bal)\. |: ")
"""The end of the first sentence of a comment; the full stop of an abbreviation is none."""


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
    return (
        "\n".join(
            [*(f"{name:{width}}  {line}".rstrip() for name, line in rows), "", COMMANDS[kind][0]]
        )
        + "\n"
    )


def _classes(base: type) -> Iterator[tuple[str, str]]:
    """The public classes that derive from a base class,
    each with the first line of its docstring.
    """
    for name, found in public_classes().items():
        if (
            isinstance(found, type)
            and issubclass(found, base)
            and found is not base
            and not inspect.isabstract(found)
        ):
            yield name, (found.__doc__ or "").partition("\n")[0].replace("``", "")


def _datasets() -> Iterator[tuple[str, str]]:
    yield from _classes(DataSource)
    for name, spec in SPECS.items():
        yield name, f"{spec.num_classes} classes, shape {' x '.join(map(str, spec.in_shape))}"
    yield IMAGE_FOLDER, "a folder of your own: root/train/<class>/ and root/test/<class>/"


def _configs() -> Iterator[tuple[str, str]]:
    """All configurations, each with the first words of the comment at its top."""
    for name, path in package_files().items():
        if not name.startswith("suites/"):
            yield name, _head(path.read_text(encoding="utf-8"))


def _suites() -> Iterator[tuple[str, str]]:
    for name, path in package_files(CONFIGS / "suites").items():
        yield name, _head(path.read_text(encoding="utf-8"))


def _head(text: str) -> str:
    """The comment at the top of a YAML file, up to its first full stop or colon."""
    comment = re.match(r"(?:#.*\n)*", text)
    words = comment[0].replace("#", " ").split() if comment else []
    return _SENTENCE.split(" ".join(words))[0].rstrip(".")


COMMANDS: dict[str, tuple[str, Callable[[], Iterator[tuple[str, str]]]]] = {
    "methods": (
        "use: --model NAME; its keys: lightning-fedssl fit --model.help NAME",
        lambda: _classes(FederatedAlgorithm),
    ),
    "configs": ("use: --config NAME; several are merged in order", _configs),
    "suites": ("use: lightning-fedssl compare NAME", _suites),
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
