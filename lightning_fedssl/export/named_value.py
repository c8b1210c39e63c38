"""Classes, functions and objects written as plain values: a class path and the arguments of its
constructor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_PLAIN = (int, float, bool, str, type(None))


class NotNamedError(ValueError):
    """A value that has no import path, such as a lambda or a network that is already built."""


def named_value(value: Any) -> Any:
    """A value as numbers, texts, lists and dicts, in the form of a configuration file.

    A class or a ``functools.partial`` becomes ``{"class_path": ..., "init_args": {...}}``, and so
    does an object whose constructor's arguments are all attributes of it. A function becomes its
    import path.

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
        return [named_value(part) for part in value]
    if isinstance(value, functools.partial):
        return _with_path(target_of(value), value.keywords)
    if inspect.isfunction(value) or inspect.isbuiltin(value):
        return _with_path(value, {})["class_path"]
    if isinstance(value, type):
        return _with_path(value, {})
    return _with_path(type(value), _constructor_arguments(value))


def named_values(values: Mapping[str, Any]) -> dict[str, Any]:
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


def target_of(factory: Any) -> Any:
    """The class or function of a partial.

    Jsonargparse wraps a class in a partial of one of its functions.

    Args:
        factory: A partial; anything else is returned as it is.

    Raises:
        NotNamedError: If the partial has positional arguments.
    """
    if not isinstance(factory, functools.partial):
        return factory
    if factory.func.__module__.split(".")[0] == "jsonargparse":
        return next(argument for argument in factory.args if isinstance(argument, type))
    if factory.args:
        raise NotNamedError("a partial with positional arguments: give them by name")
    return factory.func


def _with_path(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    path = f"{target.__module__}.{target.__qualname__}"
    try:
        found = functools.reduce(
            getattr, target.__qualname__.split("."), import_module(target.__module__)
        )
    except (AttributeError, ImportError):
        found = None
    if found is not target:
        raise NotNamedError(f"{path} cannot be imported by its name")
    return {"class_path": path, "init_args": named_value(arguments)}


def _constructor_arguments(value: Any) -> dict[str, Any]:
    names = [
        name for name in inspect.signature(type(value)).parameters if name not in ("args", "kwargs")
    ]
    if not all(hasattr(value, name) for name in names) or hasattr(value, "state_dict"):
        raise NotNamedError(
            f"a {type(value).__name__} does not show the arguments that it was made with"
        )
    return {name: getattr(value, name) for name in names}
