"""Keys from the environment: ``FEDSSL_FIT__MODEL__FREEZE=convs`` is ``--model.freeze convs`` of ``fit``.

jsonargparse reads variables of keys that its parser has. The arguments of a method, a partition or another class are
keys only after the class is chosen, so their variables are added to the end of the command line here. The method itself
is added to its begin: as a variable jsonargparse would refuse it, because it has arguments that must be given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_fedssl.cli.config_sources import content_of, lookup, options_of


def with_environment(arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command line with options for variables of the method and of keys of classes; files and options win.

    Args:
        arguments: What follows the program's name, from the command on.
        variables: The environment.
    """
    found = keys_of_variables(arguments[0], variables).values()
    keys = {key: value for key, value in sorted(found) if _belongs_to_a_class(key)}
    if not keys:
        return list(arguments)
    given = [(option.replace(".init_args", ""), value) for option, value in options_of(arguments)]
    files = [content_of(option, value) for option, value in given if option == "config"]
    unset = {
        key: value for key, value in keys.items() if key not in dict(given) and not any(_has(f, key) for f in files)
    }
    method = [f"--model={unset.pop('model')}"] if "model" in unset else []
    return [arguments[0], *method, *arguments[1:], *(f"--{key}={value}" for key, value in unset.items())]


@contextmanager
def without_method() -> Iterator[None]:
    """Hide the variables that name a method, such as ``FEDSSL_FIT__MODEL``: :func:`with_environment` has read them."""
    names = [name for name in os.environ if re.fullmatch("FEDSSL_[A-Z]+__MODEL", name)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


def without_effect(arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """A message for each variable whose key a configuration file sets, unless an option sets the key, too.

    Args:
        arguments: What follows the program's name, from the command on.
        variables: The environment.
    """
    options = [(option.replace(".init_args", ""), value) for option, value in options_of(arguments)]
    files = {value: content_of(option, value) for option, value in options if option == "config"}
    return [
        f"{name} has no effect: {file} sets {key}; give --{key} {value}"
        for name, (key, value) in sorted(keys_of_variables(arguments[0], variables).items())
        for file in [file for file, content in files.items() if _has(content, key)][-1:]
        if key not in dict(options)
    ]


def keys_of_variables(command: str, variables: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The keys that variables set, without ``init_args``, with their values, by the names of the variables.

    Args:
        command: The command.
        variables: The environment.
    """
    prefix = f"FEDSSL_{command.upper()}__"
    ours = {name: value for name, value in variables.items() if name.startswith(prefix)}
    keys = {name: name.removeprefix(prefix).lower().replace("__", ".") for name in ours}
    return {name: (keys[name].replace(".init_args", ""), value) for name, value in ours.items()}


def _belongs_to_a_class(key: str) -> bool:
    """Whether a key is the method or an argument of a class: ``model``, ``model.freeze``, ``data.partition.alpha``."""
    group, *rest = key.split(".")
    return group == "model" or (group in ("trainer", "data") and len(rest) > 1)


def _has(content: Any, key: str) -> bool:
    return any(True for _ in lookup(content, key))
