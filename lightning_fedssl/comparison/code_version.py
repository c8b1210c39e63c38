"""A hash of the code that a run uses, so that a cached result is reused only if that code has not changed."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_fedssl

PACKAGES = ("torch", "torchvision", "numpy")
"""Packages whose version is part of the hash."""

_NOT_READ = ("algorithms", "comparison", "cli", "__main__", "__init__", "configs")
"""Parts of the package that are not hashed for every run. Of the algorithms, those that a run uses are hashed."""

_PACKAGE = "lightning_fedssl"


def code_version(config: dict[str, Any]) -> str:
    """A hash of the code that the run of a configuration uses.

    It covers the modules of the package except those of other methods, of the command line and of the comparison; the
    files of the user's own classes; and the versions of :data:`PACKAGES`. Comments and formatting do not change it.

    Args:
        config: A resolved configuration; its class paths determine the modules.
    """
    modules = {module for path in class_paths(config) if (module := _module_of(path))}
    methods = _with_imports(m for m in modules if m.startswith(f"{_PACKAGE}.algorithms."))
    own = {m for m in modules if m.partition(".")[0] not in (_PACKAGE, "lightning", *PACKAGES)}
    files = {*_common_files(), *(_file_of(module) for module in methods | own)}
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    return hashlib.sha256("\n".join([*sorted(map(_of_file, files)), *versions]).encode()).hexdigest()


def class_paths(value: Any) -> Iterator[str]:
    """Every ``class_path`` in a configuration."""
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from class_paths(part)


def _module_of(class_path: str) -> str | None:
    """The module that defines a class, which may differ from the one in its class path."""
    module, _, name = class_path.rpartition(".")
    target = getattr(import_module(module), name)
    return getattr(inspect.unwrap(target), "__module__", None)


def _with_imports(modules: Iterable[str]) -> set[str]:
    """The modules, and those of the algorithms' folder that they import directly or indirectly."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [m for m in _imports(_file_of(module)) if m.startswith(f"{_PACKAGE}.algorithms.")]
    return found


@cache
def _imports(path: Path) -> tuple[str, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module)


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


@cache
def _of_file(path: Path) -> str:
    return hashlib.sha256(ast.dump(ast.parse(path.read_text(encoding="utf-8"))).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
