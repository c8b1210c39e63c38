"""Every public option and name pays its rent: somebody gives the option, or uses the name.

A mention is no use. An option is given by its key or its place: to its class, or to a function that passes it on.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch.autograd import Function

import lightning_fedssl

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
KEY = re.compile(r"(\w+)[\"']?\s*[:=]")
WORD = re.compile(r"\w+")
OPTION = re.compile(r"(?:--|\b(?:model|data|trainer)\.)([\w.-]+)")
KINDS = (Callback, LightningModule, Trainer, LightningCLI, LightningArgumentParser, Function)
FOREIGN = {"setup_context", "parser_kwargs"}.union(*map(dir, KINDS))
"""What Lightning or torch calls or gives."""


def read(*patterns: str) -> list[str]:
    """The texts of files, but of this one, of templates, and of those that only pass names on."""
    paths = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if "templates" not in path.parts)
    return [path.read_text("utf-8") for path in paths if path.name not in ("__init__.py", "test_rent.py")]


def words(pattern: re.Pattern[str], *files: str) -> set[str]:
    """The words of what a pattern finds in files."""
    return {word for text in read(*files) for found in pattern.findall(text) for word in WORD.findall(found)}


PACKAGE = ("lightning_fedssl/**/*.py", "callbacks/*.py")
OUTSIDE = ("tests/**/*.py", "examples/**/*.py", "benchmarks/**/*.py", "docs/*.py")
PAGES, CONFIGS = "lightning_fedssl/**/*.html", ("configs/**/*.yaml", "examples/**/*.yaml")
INSIDE = [ast.parse(text) for text in read(*PACKAGE)]
CLASSES = {node.name: node for tree in INSIDE for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
WRITTEN = words(CODE, "*.md", "docs/**/*.md") | words(KEY, *CONFIGS)
"""The words of all code on pages, and the keys of configurations."""


def last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c``."""
    return str(getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))).rpartition(".")[2]


def family(name: str) -> set[str]:
    """A class of the package and those that it derives from."""
    bases = {last_name(base) for base in CLASSES[name].bases} & (CLASSES.keys() - {name})
    return {name}.union(*map(family, bases))


class Uses:
    """What some modules give and use.

    Attributes:
        keys: By class, the options that it is given by key; by the empty name those that another function is given.
        places: By class or function, the largest number of arguments that it is given without a key.
        names: What is called or read.
    """

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.keys: dict[str, set[str]] = defaultdict(set)
        self.places: dict[str, int] = defaultdict(int)
        self.names: set[str] = set()
        for tree in trees:
            for node in ast.walk(tree):
                self.add(node)

    def add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            called, arguments = node.func, node.args
            if last_name(called) == "partial":
                called, *arguments = arguments
            name = last_name(called)
            for owner in family(name) if name in CLASSES else ("",):
                self.keys[owner] |= {keyword.arg for keyword in node.keywords if keyword.arg}
            several = any(isinstance(argument, ast.Starred) for argument in arguments)
            self.places[name] = max(self.places[name], 99 if several else len(arguments))
        elif isinstance(node, ast.Dict):
            self.add_keys(str(getattr(key, "value", "")) for key in node.keys)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.add_keys(OPTION.findall(node.value))
            self.names.add(node.value)  # such as the name of a hook
        elif isinstance(node, (ast.Name, ast.Attribute)):
            self.names.add(last_name(node))

    def add_keys(self, options: Iterable[str]) -> None:
        self.keys[""] |= {word for option in options for word in option.replace("-", "_").split(".")}


@cache
def uses(*patterns: str) -> Uses:
    return Uses(map(ast.parse, read(*patterns)))


def options(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """What may be left out: its class or function, its name, and its place; 99 for an option without a place."""
    for node in ast.walk(tree):
        is_class = isinstance(node, ast.ClassDef)
        for function in node.body if isinstance(node, (ast.ClassDef, ast.Module)) else ():
            if isinstance(function, ast.FunctionDef):
                given = function.args
                owner = last_name(node if function.name == "__init__" else function)
                for place, argument in [*enumerate(given.args)][len(given.args) - len(given.defaults) :]:
                    yield owner, argument.arg, place - is_class
                by_key = zip(given.kwonlyargs, given.kw_defaults, strict=True)
                yield from ((owner, argument.arg, 99) for argument, default in by_key if default is not None)


def test_somebody_gives_every_option() -> None:
    """Those of classes that users make from outside the package, others also inside of it."""
    known, unused = WRITTEN | FOREIGN | words(KEY, PAGES), []
    for owner, name, place in (option for tree in INSIDE for option in options(tree)):
        users = [uses(*OUTSIDE), *([] if owner in lightning_fedssl.__all__ else [uses(*PACKAGE)])]
        given = any(name in uses.keys[""] or name in uses.keys[owner] or uses.places[owner] > place for uses in users)
        if not (given or name in known or owner in FOREIGN or owner.startswith("_")):
            unused.append(f"{owner}.{name}")
    assert not unused, f"nobody gives {unused}: delete it, or show on a page or in a test what it is for"


def test_somebody_uses_every_public_name() -> None:
    named = uses(*OUTSIDE).names | uses(*PACKAGE).names | WRITTEN | FOREIGN | words(WORD, PAGES, *CONFIGS)
    nodes = [node for tree in INSIDE for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    unused = {node.name for node in nodes if not node.name.startswith("_")} - named
    assert not unused, f"nobody uses {unused}: delete it, or show on a page or in a test what it is for"
