"""A hash of the code that a run uses, so that a cached result is reused only if that code has not changed."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_fedssl

PACKAGES = ("torch", "torchvision", "numpy", "lightning", "torchmetrics")
"""Packages whose version is part of the hash."""

_NOT_READ = ("algorithms", "comparison", "cli", "__main__", "__init__", "configs")
"""Parts of the package that are not hashed for every run. Of the algorithms, those that a run uses are hashed."""

_PACKAGE = "lightning_fedssl"
_METHODS = f"{_PACKAGE}.algorithms."
_INSTALLED = tuple(
    Path(path).resolve() for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")
)
"""Folders of Python's own library and of installed packages."""


def code_version(config: dict[str, Any], datamodule: type | None = None) -> str:
    """A hash of the code that the run of a configuration uses.

    It covers the modules of this package except those of other methods, of the command line and of the comparison; the
    files of all classes and functions that the configuration names, and of the user's own modules that these import,
    directly or indirectly; and the versions of :data:`PACKAGES`. Comments and formatting do not change it.

    Args:
        config: A resolved configuration, whose classes and functions have been imported.
        datamodule: The class of the data, if it is the user's own.
    """
    targets = [target for path in names(config) if (target := _target_of(path)) is not None]
    named = {module for target in [*targets, datamodule] for module in _modules_of(target)}
    files = {*_common_files(), *(_file_of(module) for module in _with_imports(named) if _counts(module))}
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    return hashlib.sha256("\n".join([*sorted(map(_of_file, files)), *versions]).encode()).hexdigest()


def names(value: Any) -> Iterator[str]:
    """Every text in a configuration that may be the import path of a class or a function."""
    if isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from names(part)


def _target_of(path: str) -> Any:
    """The class or function that an import path names; None for a text that names nothing that is imported."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for name in parts[length:]:
                found = getattr(found, name, None)
            return found
    return None


def _modules_of(target: Any) -> set[str]:
    """The modules that define a class and its bases, or a function."""
    whole = inspect.getmro(target) if inspect.isclass(target) else [inspect.unwrap(target)] if callable(target) else []
    return {str(getattr(part, "__module__", "")) for part in whole} & sys.modules.keys()


def _with_imports(modules: Iterable[str]) -> set[str]:
    """The modules, and what they import directly or indirectly: modules of the user and of the algorithms' folder."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            if _counts(module) and (module.startswith(_METHODS) or _is_users(module)):
                waiting += [m for m in _imports(module) if m.startswith(_METHODS) or _is_users(m)]
    return found


def _counts(module: str) -> bool:
    """Whether a module has a source that is hashed; the package's other modules and :data:`PACKAGES` always count."""
    own = module.startswith(_METHODS) or module.partition(".")[0] not in (_PACKAGE, *PACKAGES)
    return own and str(getattr(sys.modules.get(module), "__file__", None) or "").endswith(".py")


def _is_users(module: str) -> bool:
    """Whether a module is no part of this package, of Python or of an installed package."""
    if module.partition(".")[0] == _PACKAGE or not _counts(module):
        return False
    return not any(_file_of(module).resolve().is_relative_to(folder) for folder in _INSTALLED)


def _imports(module: str) -> Iterator[str]:
    """The modules that a module imports, as far as they are loaded."""
    package = module if _file_of(module).name == "__init__.py" else module.rpartition(".")[0]
    for name, level, parts in _import_statements(_file_of(module)):
        above = ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""
        whole = ".".join(filter(None, [above, name]))
        yield from (m for m in (whole, *(f"{whole}.{part}" for part in parts)) if m in sys.modules)
        for part in parts:  # a package may give names of its modules as its own
            yield from _modules_of(getattr(sys.modules.get(whole), part, None))


@cache
def _import_statements(path: Path) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """What each import statement of a file names: a module, the level of a relative import, and names in the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[str, int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.level, tuple(alias.name for alias in node.names)))
    return tuple(found)


@cache
def _file_of(module: str) -> Path:
    return Path(inspect.getfile(import_module(module)))


@cache
def _common_files() -> tuple[Path, ...]:
    """The files that are hashed for every run."""
    package = Path(lightning_fedssl.__file__).parent
    callbacks = Path(inspect.getfile(import_module(f"{_PACKAGE}.callbacks"))).parent
    files = [*package.rglob("*.py"), *callbacks.glob("*.py")]
    return tuple(f for f in files if not (f.is_relative_to(package) and _part(f.relative_to(package)) in _NOT_READ))


def _part(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _of_file(path: Path) -> str:
    try:
        status = path.stat()
        return _hash(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return "removed"


@cache
def _hash(path: Path, changed: int, size: int) -> str:
    """The hash of a file as it was at the time of its last change; a file that is being edited may be no valid code."""
    code = path.read_bytes()
    with contextlib.suppress(SyntaxError, ValueError):  # a ValueError for null bytes
        code = ast.dump(ast.parse(code)).encode()
    return hashlib.sha256(code).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
