"""Writes what is known of the package's classes without importing them.

``lightning_fedssl/algorithms/__init__.pyi`` has the methods' constructors with every argument, for type checkers and
editors: a method's own constructor names its own arguments and passes the others on.
``lightning_fedssl/cli/lists.json`` has what ``lightning-fedssl methods`` and its like list, with a line about each.

    python docs/build_stubs.py
"""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from types import NoneType

from jsonargparse import ArgumentParser

from lightning_fedssl import algorithms
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli import listing
from lightning_fedssl.cli.config_files import CONFIGS, package_files
from lightning_fedssl.cli.public import PARTS
from lightning_fedssl.data import DataSource, Partition
from lightning_fedssl.data.datasets import IMAGE_FOLDER, SPECS
from lightning_fedssl.system import Availability

FILE = Path(algorithms.__file__).with_suffix(".pyi")
HEAD = """\
# Written by docs/build_stubs.py.
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

"""
ALSO = """\
from lightning_fedssl.algorithms.uda import Annealing
from lightning_fedssl.functional.schedules import Schedule
from lightning_fedssl.task import Task
"""
SENTENCE = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bApp)(?<!\bal)\. |: ")
"""The end of the first sentence of a comment; the full stop of an abbreviation does not count."""


def constructor(method: type) -> list[str]:
    """The arguments of a method: its own in their order, then those that it passes on by name."""
    parser = ArgumentParser()
    parser.add_class_arguments(method, "of", fail_untyped=False)
    defaults = vars(parser.get_defaults().of)
    classes = [c for c in method.__mro__ if "__init__" in vars(c) and c.__module__.startswith("lightning_fedssl")]
    every = {p.name: p for c in reversed(classes) for p in inspect.signature(c).parameters.values()}
    own = list(inspect.signature(method).parameters)
    passed_on = sorted(defaults.keys() - {*own})
    lines = []
    for name in [
        *(n for n in own if n in every and every[n].kind is not inspect.Parameter.VAR_KEYWORD),
        "*",
        *passed_on,
    ]:
        if name == "*":
            lines += ["*"] if passed_on else []
            continue
        default = defaults[name]
        shown = json.dumps(default) if isinstance(default, str) else repr(default)
        shown = shown if isinstance(default, (str, int, float, NoneType)) and default != math.inf else "..."
        required = every[name].default is inspect.Parameter.empty
        kind = every[name].annotation.replace("'", '"').replace("NetworkFactory", "Callable[..., nn.Module]")
        lines.append(f"{name}: {kind}" + ("" if required else f" = {shown}"))
    return lines


def text() -> str:
    """The stub: each method derives from its class and from the public methods that this derives from."""
    methods = {name: getattr(algorithms, name) for name in algorithms.__all__}
    classes = sorted(methods.values(), key=lambda c: (len(c.__mro__), c.__name__))
    imports = sorted(f"from {c.__module__} import {c.__name__} as _{c.__name__}\n" for c in classes)
    parts = [HEAD, *imports, ALSO, "\n__all__ = [\n", *(f'    "{name}",\n' for name in methods), "]\n"]
    for c in classes:
        above = [m for m in c.__mro__[1:] if m in classes]
        bases = ", ".join([f"_{c.__name__}", *(m.__name__ for m in above[:1])])
        arguments = ",\n        ".join(["self", *constructor(c)])
        parts.append(f"\nclass {c.__name__}({bases}):\n    def __init__(\n        {arguments},\n    ) -> None: ...\n")
    return "".join(parts)


def lists() -> str:
    """Names by the command that lists them, each with a line about it, as JSON."""
    datasets = {
        name: f"{spec.num_classes} classes, shape {' x '.join(map(str, spec.in_shape))}" for name, spec in SPECS.items()
    }
    datasets[IMAGE_FOLDER] = "a folder of your own: root/train/<class>/ and root/test/<class>/"
    found = {
        "methods": derived_from(FederatedAlgorithm),
        "datasets": datasets | derived_from(DataSource),
        "partitions": derived_from(Partition),
        "availability": derived_from(Availability),
        "configs": comments(CONFIGS),
        "suites": comments(CONFIGS / "suites"),
    }
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def derived_from(base: type) -> dict[str, str]:
    """The public classes that derive from a base class, each with the first line of its docstring."""
    public = [getattr(part, name) for part in PARTS for name in part.__all__]
    return {
        c.__name__: (c.__doc__ or "").partition("\n")[0].replace("``", "")
        for c in public
        if isinstance(c, type) and issubclass(c, base) and c is not base and not inspect.isabstract(c)
    }


def comments(folder: Path) -> dict[str, str]:
    """Files of the package with the comment at the top of each, up to its first full stop or colon."""
    found = {}
    for name, path in package_files(folder).items():
        if not name.startswith("suites/"):
            comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
            words = comment[0].replace("#", " ").split() if comment else []
            found[name] = SENTENCE.split(" ".join(words))[0].rstrip(".")
    return found


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    listing.FILE.write_text(lists(), encoding="utf-8")
