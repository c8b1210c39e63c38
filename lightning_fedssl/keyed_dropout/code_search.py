"""Whether the code of a method or a network may call a function of dropout, found without running it."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.nn import functional as F

_FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_NAMES = {function.__name__ for function in _FUNCTIONS}
_LIBRARIES = ("torch", "torchvision", "torchmetrics", "lightning", "lightning_utilities", "numpy", "scipy")
"""Packages whose functions are not searched: their layers of dropout are found by type."""


def mentions_dropout(module: nn.Module) -> bool:
    """Whether a function of a module's class or of a layer's class, or a function that it calls, names dropout.

    Functions are followed by their names, in the module of the calling function and in modules that it imports. A name
    that means something else counts, too. Of a layer with an attribute ``uses_dropout``, this is the answer.

    Args:
        module: An algorithm or a network.
    """
    known = [bool(layer.uses_dropout) for layer in module.modules() if hasattr(layer, "uses_dropout")]
    seen: set[int] = set()
    return any(known) or any(_names_dropout(function, seen) for function in _functions_of(module))


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of the classes of all layers, and those that layers have as attributes."""
    layers = [layer for layer in module.modules() if not hasattr(layer, "uses_dropout")]
    kinds = {kind: None for layer in layers for kind in type(layer).__mro__ if not _is_library(kind.__module__)}
    for holder in (*kinds, *layers):
        yield from filter(None, map(_function, vars(holder).values()))


def _function(value: Any) -> FunctionType | None:
    """The Python function behind a method, property, partial or decorated function; None for anything else."""
    for inner in ("__wrapped__", "__func__", "fget", "func"):
        if isinstance(found := getattr(value, inner, None), FunctionType):
            return found
    return value if isinstance(value, FunctionType) else None


def _names_dropout(function: FunctionType, seen: set[int]) -> bool:
    if id(function.__code__) in seen:
        return False
    seen.add(id(function.__code__))
    codes = list(_with_inner(function.__code__))
    names = set().union(*(code.co_names for code in codes))
    if names & _NAMES and _NAMES.intersection(name for code in codes for name in _names_in(code)):
        return True
    known = [function.__globals__[name] for name in sorted(names) if name in function.__globals__]
    known += [value for cell in function.__closure__ or () for value in _contents(cell)]
    modules = [value for value in known if isinstance(value, ModuleType) and not _is_library(value.__name__)]
    known += [vars(module)[name] for module in modules for name in sorted(names) if name in vars(module)]
    if any(value is of_torch for value in known for of_torch in _FUNCTIONS):
        return True
    called = [found for found in map(_function, known) if found is not None and not _is_library(found.__module__)]
    return any(_names_dropout(found, seen) for found in called)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names of global variables and attributes that a function uses, without the attributes of ``self``.

    ``self.dropout`` is a layer, which is found by its type, or a number.
    """
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        of_self = before is not None and before.opname.startswith("LOAD_FAST") and before.argval == "self"
        if instruction.argval in code.co_names and not of_self:
            yield instruction.argval
        before = instruction


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions and comprehensions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _contents(cell: Any) -> list[Any]:
    """What a variable of an outer function holds; nothing before it is set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@functools.cache
def _is_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package == "builtins"
