"""Arguments of the package's classes and their types, read from the sources as text: importing them takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import lightning_fedssl

_PACKAGE = Path(__file__).resolve().parent.parent
_COLLECTIONS = ("algorithms", "data", "models", "callbacks", "system", "schedules")
"""Packages whose classes can be named without their module."""


def arguments_of(path: str, method: str = "__init__") -> tuple[str, ...] | None:
    """The arguments of a class's constructor, or of another method, with those that it passes on to its bases.

    Args:
        path: The class's name, or its import path.
        method: The method.

    Returns:
        None if the class is not found as text, or if it passes arguments on to a class of another package.
    """
    found = annotations_of(path, method)
    return None if found is None else tuple(found)


def annotations_of(path: str, method: str = "__init__") -> dict[str, str] | None:
    """The arguments as :func:`arguments_of` has them, each with its annotation as text, empty for none.

    Args:
        path: The class's name, or its import path.
        method: The method.
    """
    module, _, name = path.rpartition(".")
    if module:
        return _of_class(module, name, method)
    found = (_of_class(f"lightning_fedssl.{part}", name, method) for part in _COLLECTIONS)
    return next((arguments for arguments in found if arguments), None)


@cache
def _of_class(module: str, name: str, method: str) -> dict[str, str] | None:
    tree = _tree(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_node(module, node, method)
        if isinstance(node, ast.ImportFrom) and name in (alias.asname or alias.name for alias in node.names):
            return _of_class(f"{module}.{node.module}" if node.level else str(node.module), name, method)
    return None


def _of_node(module: str, node: ast.ClassDef, method: str) -> dict[str, str] | None:
    made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method), None)
    named = (*made.args.args[1:], *made.args.kwonlyargs) if made else ()
    own = {argument.arg: ast.unparse(argument.annotation) if argument.annotation else "" for argument in named}
    if made is not None and made.args.kwarg is None:
        return own
    for base in node.bases:
        if ast.unparse(base) == "ABC":
            continue
        inherited = _of_class(module, ast.unparse(base), method)
        if inherited is None:
            return None
        own = {**own, **inherited, **own}  # in this order, with its own annotations
    return own


@cache
def _tree(module: str) -> ast.Module | None:
    """The source of a module of this package; ``callbacks`` can be in another folder than the rest."""
    first, *parts = module.split(".")
    if first != _PACKAGE.name or not parts:
        return None
    for folder in (_PACKAGE, *map(Path, lightning_fedssl.__path__)):
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
    return None
