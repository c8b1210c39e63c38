"""Classes, functions and objects written as plain values, a class path and the arguments of its
constructor, and read again.

What is read may be somebody else's: see :func:`object_of`.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn
from torch.optim import Optimizer

from lightning_fedssl.functional.schedules import Schedule
from lightning_fedssl.task import Task

Values = dict[str, Any]

_PLAIN = (int, float, bool, str, type(None))

TRUSTED = ("lightning_fedssl", "torch", "torchvision", "timm", "peft")
"""Packages whose networks, optimizers and schedules are built where a file names them."""


class NotNamedError(ValueError):
    """A value that has no import path, such as a lambda or a network that is already built."""


def named_value(value: Any) -> Any:
    """A value as numbers, texts, lists and dicts, in the form of a configuration file.

    A class, a function or a ``functools.partial`` becomes ``{"class_path": ..., "init_args":
    {...}}``, and so does an object whose constructor's arguments are all attributes of it.

    Args:
        value: An argument of an algorithm.

    Raises:
        NotNamedError: If the value, or a part of it, cannot be imported by name.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(key): named_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(named_value, value))
    if isinstance(value, functools.partial):
        return _with_path(target_of(value), value.keywords)
    if isinstance(value, type) or inspect.isfunction(value) or inspect.isbuiltin(value):
        return _with_path(value, {})
    return _with_path(type(value), _constructor_arguments(value))


def named_values(values: Mapping[str, Any]) -> Values:
    """The values that :func:`named_value` can write, by name; the others are left out.

    Args:
        values: Arguments of an algorithm by name.
    """
    named = {}
    for name, value in values.items():
        try:
            named[name] = named_value(value)
        except NotNamedError:
            continue
    return named


def object_of(value: Any, trust: Sequence[str] = ()) -> Any:
    """The value that :func:`named_value` wrote.

    A network's or optimizer's class, and a function, is returned uncalled, as a partial if it has
    arguments; of any other class an object is made.

    Args:
        value: Plain values, from a file of anybody.
        trust: See :func:`imported`.

    Raises:
        ValueError: A class is not trusted, or cannot be imported.
    """
    if isinstance(value, list):
        return [object_of(part, trust) for part in value]
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return {name: object_of(part, trust) for name, part in value.items()}
    target = imported(value["class_path"], (nn.Module, Optimizer, Schedule, Task), trust)
    arguments = arguments_of(target, value.get("init_args") or {}, trust)
    if isinstance(target, type) and not issubclass(target, (nn.Module, Optimizer)):
        return made(target, arguments)
    return functools.partial(target, **arguments) if arguments else target


def arguments_of(target: Callable[..., Any], values: Any, trust: Sequence[str] = ()) -> Values:
    """The arguments of a constructor or function that a file of anybody gives, as objects.

    A text stays a text, and nothing looks for a class in it.

    Args:
        target: The class or function.
        values: The arguments as the file has them.
        trust: See :func:`imported`.

    Raises:
        ValueError: The values are not names with values; a name begins with an underscore, which
            Lightning takes for an instruction; a text is given where the target takes an object or
            a number; or a class that is named is not trusted.
    """
    target_name = getattr(target, "__qualname__", target)
    if not isinstance(values, Mapping):
        raise ValueError(
            f"the file gives {target_name} the arguments {values!r}; init_args must be names with "
            "values"
        )
    hints = _hints(target)
    for name, value in values.items():
        if not isinstance(name, str) or name.startswith("_"):
            raise ValueError(
                f"the file gives {target_name} the argument {name!r}, which is not an argument of "
                "a constructor, and nothing of it was run; do not use this file"
            )
        if _has_text(value) and not _takes_text(hints.get(name, Any)):
            raise ValueError(
                f"the file gives {target_name} as {name} the text {value!r}, and nothing of it was "
                "run: class_path and init_args are expected, or a number; do not use this file"
            )
    return {name: object_of(value, trust) for name, value in values.items()}


def made(target: Callable[..., Any], arguments: Values) -> Any:
    """What a class or function returns for arguments of a file.

    Args:
        target: The class or function.
        arguments: What :func:`arguments_of` returned.

    Raises:
        ValueError: The target does not take these arguments.
    """
    try:
        return target(**arguments)
    except TypeError as error:
        raise ValueError(
            f"the arguments in the file are not those of {target!r}: {error}"
        ) from error


def _hints(target: Callable[..., Any]) -> Values:
    """The types of a target's arguments by name, for a class also those of its base classes."""
    functions = [target]
    if isinstance(target, type):
        functions = [vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base)]
    hints: Values = {}
    for function in reversed(functions):
        with suppress(NameError, TypeError):  # types that are imported for type checkers alone
            hints |= get_type_hints(function)
    return hints


def _takes_text(hint: Any) -> bool:
    """Whether a value of a type may be, or contain, a text."""
    accepts_text = hint in (Any, str, object) or get_origin(hint) is Literal
    return accepts_text or any(map(_takes_text, get_args(hint)))


def _has_text(value: Any) -> bool:
    """Whether a value is, or contains, a text."""
    return isinstance(value, str) or (isinstance(value, list) and any(map(_has_text, value)))


def imported(path: Any, kinds: tuple[type, ...], trust: Sequence[str] = ()) -> Any:
    """The class that a file names.

    Args:
        path: The import path.
        kinds: Base classes; a class of the :data:`TRUSTED` packages must derive from one.
        trust: Modules that the caller trusts, too; any class or function that is defined in them
            or in a module below them may be named.

    Raises:
        ValueError: The path names anything else, which is then neither imported nor called; or it
            does not exist.
    """
    trusted = _is_in(path, trust)
    # Of the known packages no private module: importing one may run a program.
    public = not re.search(r"(^|[.:])_", str(path))
    if trusted or (public and str(path).partition(".")[0] in TRUSTED):
        try:
            value = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path}, which the file names, cannot be imported: {error}"
            ) from error
        if isinstance(value, type) and issubclass(value, kinds):
            return value
        if trusted and _is_in(getattr(value, "__module__", None), trust):  # not what it imports
            return value
    module = str(path).rpartition(".")[0]
    raise ValueError(
        f"the file names {path}, and nothing of it was run: only classes of networks, optimizers "
        f"and schedules of {', '.join(TRUSTED)} are built from a file. If you trust {module}, name "
        f"it: trust=[{module!r}] in Python, --trust {module} for export"
    )


def _is_in(name: Any, modules: Sequence[str]) -> bool:
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


def unwrapped(factory: Any) -> Any:
    """The class that jsonargparse has wrapped in a partial of one of its own functions; anything
    else is returned as it is.
    """
    if (
        not isinstance(factory, functools.partial)
        or factory.func.__module__.split(".")[0] != "jsonargparse"
    ):
        return factory
    return next(argument for argument in factory.args if isinstance(argument, type))


def target_of(factory: Any) -> Any:
    """The class or function of a partial.

    Args:
        factory: A partial; anything else is returned as it is.

    Raises:
        NotNamedError: If the partial has positional arguments.
    """
    factory = unwrapped(factory)
    if not isinstance(factory, functools.partial):
        return factory
    if factory.args:
        raise NotNamedError("a partial with positional arguments: give them by name")
    return factory.func


def _with_path(target: Any, arguments: Mapping[str, Any]) -> Values:
    path = f"{target.__module__}.{target.__qualname__}"
    try:
        importable = pkgutil.resolve_name(f"{target.__module__}:{target.__qualname__}")
    except (AttributeError, ImportError, ValueError):
        importable = None
    if importable is not target:
        raise NotNamedError(f"{path} cannot be imported by its name")
    return {"class_path": path, "init_args": named_value(arguments)}


def _constructor_arguments(value: Any) -> Values:
    names = [
        name for name in inspect.signature(type(value)).parameters if name not in ("args", "kwargs")
    ]
    trained = hasattr(value, "state_dict") and not getattr(value, "follows_from_arguments", False)
    if trained or not all(hasattr(value, name) for name in names):
        raise NotNamedError(
            f"a {type(value).__name__} does not show the arguments that it was made with"
        )
    return {name: getattr(value, name) for name in names}
