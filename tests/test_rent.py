"""Every public argument and name pays its rent: a configuration, a page, an example or a test uses it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def words(*patterns: str) -> set[str]:
    """The words of all files of these patterns."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern) if ".git" not in path.parts]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text("utf-8").replace("-", "_"))}


USES = words(
    "*.md",
    "docs/**/*.md",
    "docs/*.py",
    "configs/**/*.yaml",
    "examples/**/*.yaml",
    "examples/**/*.py",
    "benchmarks/**/*.py",
    "tests/**/*.py",
)
MODULES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("lightning_fedssl", "callbacks")
    for path in (ROOT / folder).rglob("*.py")
    if "templates" not in path.parts
}
OF_LIGHTNING = {"parser_kwargs"}
"""Arguments of Lightning's classes that ours pass on."""


def options_of(function: ast.stmt) -> list[str]:
    """The arguments of a constructor that may be left out."""
    if not (isinstance(function, ast.FunctionDef) and function.name == "__init__"):
        return []
    given = function.args
    by_place = given.args[len(given.args) - len(given.defaults) :]
    by_name = [a for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is not None]
    return [argument.arg for argument in by_place + by_name]


def test_somebody_uses_every_argument_of_a_public_class() -> None:
    unused = []
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                options = {name for function in node.body for name in options_of(function)}
                unused += [f"{node.name}.{name}" for name in sorted(options - USES - OF_LIGHTNING)]
    assert not unused, f"no configuration, page, example or test names {unused}: delete it, or show what it is for"


def test_somebody_uses_every_public_function_and_class() -> None:
    inside = Counter(word for path in MODULES for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))
    unused = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, tree in MODULES.items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        if inside[node.name] == 1 and node.name not in USES
    ]
    assert not unused, f"nothing names {unused}"
