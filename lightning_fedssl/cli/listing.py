"""The commands that list what the package contains: methods, configs, suites, datasets, partitions, availability.

They read source files and YAML files as text instead of importing them: an answer takes a tenth of a second, and the
import of PyTorch and Lightning takes several.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lightning_fedssl
from lightning_fedssl.cli.config_files import package_files

_PACKAGE = Path(lightning_fedssl.__file__).parent


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
    return "\n".join([*(f"{name:{width}}  {line}".rstrip() for name, line in rows), "", COMMANDS[kind][0]]) + "\n"


def _methods() -> Iterator[tuple[str, str]]:
    """The classes that ``algorithms`` exports, each with a line from the docstring of its file or class."""
    exported = list(_exported(_PACKAGE / "algorithms"))
    alone = Counter(path for _, path in exported)
    for name, path in exported:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield name, _first_line(tree) if alone[path] == 1 else _class_line(path, name)


def _partitions() -> Iterator[tuple[str, str]]:
    """The subclasses of ``Partition`` that ``data`` exports, each with the first line of its docstring."""
    for name, path in _exported(_PACKAGE / "data"):
        bases = [ast.unparse(base) for node in _classes(path) if node.name == name for base in node.bases]
        if any("Partition" in base or "Labels" in base for base in bases):
            yield name, _class_line(path, name)


def _availability() -> Iterator[tuple[str, str]]:
    """The subclasses of ``Availability`` that ``system`` exports, each with the first line of its docstring."""
    for name, path in _exported(_PACKAGE / "system"):
        if any(node.name == name and "Availability" in map(ast.unparse, node.bases) for node in _classes(path)):
            yield name, _class_line(path, name)


def _datasets() -> Iterator[tuple[str, str]]:
    """The data sets by name, from ``data/datasets.py``, and the sources of data that are given by their class."""
    tree = ast.parse((_PACKAGE / "data" / "datasets.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "DatasetSpec" and len(node.args) > 2:
            name, classes, shape = (ast.literal_eval(argument) for argument in node.args[:3])
            about = f"{classes} classes, shape {' x '.join(map(str, shape))}"
            yield name, about if classes else "a folder of your own: root/train/<class>/ and root/test/<class>/"
    for name, path in _exported(_PACKAGE / "data"):
        bases = [ast.unparse(base) for node in _classes(path) if node.name == name for base in node.bases]
        if name != "ImageList" and {"DataSource", "ImageList"} & set(bases):
            yield name, _class_line(path, name)


def _configs() -> Iterator[tuple[str, str]]:
    """All configurations, each with the first words of the comment at its top."""
    return ((name, _head(path)) for name, path in package_files().items() if not name.startswith("suites/"))


def _suites() -> Iterator[tuple[str, str]]:
    """The suites, each with the first words of the comment at its top."""
    return ((path.name, _head(path)) for name, path in package_files().items() if name.startswith("suites/"))


COMMANDS = {
    "methods": ("use: --model NAME; its keys: lightning-fedssl fit --model.help NAME", _methods),
    "configs": ("use: --config NAME; several are merged in order", _configs),
    "suites": ("use: lightning-fedssl compare NAME", _suites),
    "datasets": (
        "use: --data.dataset NAME; options of a class: --data.dataset.OPTION VALUE",
        _datasets,
    ),
    "partitions": (
        "use: --data.partition NAME; its keys: lightning-fedssl fit --data.partition.help NAME",
        _partitions,
    ),
    "availability": (
        "use: --trainer.availability NAME; its keys: lightning-fedssl fit --trainer.availability.help NAME",
        _availability,
    ),
}
"""The listing commands: a hint how to use a name, and the function that finds the rows."""


def _exported(folder: Path) -> Iterator[tuple[str, Path]]:
    """Capitalised names that a package's ``__init__`` imports, with the file that each comes from."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module)
    for node in (node for node in found if str(node.module).startswith(_PACKAGE.name)):
        module = _PACKAGE.parent.joinpath(*str(node.module).split("."))
        if module.is_dir():
            yield from _exported(module)
        else:
            yield from ((alias.name, module.with_suffix(".py")) for alias in node.names if alias.name[0].isupper())


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def _class_line(path: Path, name: str) -> str:
    """The first line of a class's docstring."""
    return next((_first_line(node) for node in _classes(path) if node.name == name), "")


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0].replace("``", "")


def _head(path: Path) -> str:
    """The comment at the top of a YAML file, up to its first full stop or colon."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return _END.split(" ".join(lines))[0].rstrip(".")


_END = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bApp)(?<!\bal)\. |: ")
"""A full stop or a colon; the full stop of an abbreviation is none."""
