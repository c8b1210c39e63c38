"""Keys from the environment: ``FEDSSL_FIT__MODEL__FREEZE=convs`` is ``--model.freeze convs`` of ``fit``.

jsonargparse reads variables of keys that its parser has. The arguments of a method, a partition or another class are
keys only after the class is chosen, so their variables are added to the end of the command line here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fedssl.cli.config_sources import content_of, options_of


def with_environment(arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command line with options for the variables of keys of classes; files and options have precedence.

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
    return [*arguments, *(f"--{key}={value}" for key, value in unset.items())]


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
    """The keys that variables set, with their values, by the names of the variables.

    Args:
        command: The command.
        variables: The environment.
    """
    prefix = f"FEDSSL_{command.upper()}__"
    ours = {name: value for name, value in variables.items() if name.startswith(prefix)}
    return {name: (name.removeprefix(prefix).lower().replace("__", "."), value) for name, value in ours.items()}


def _belongs_to_a_class(key: str) -> bool:
    """Whether a key is an argument of a class that another key names: ``model.freeze``, ``data.partition.alpha``."""
    group, *rest = key.split(".")
    return group in ("model", "trainer", "data") and len(rest) > (0 if group == "model" else 1)


def _has(content: Any, key: str) -> bool:
    """Whether a file sets a key; the arguments of a class stand below ``init_args``."""
    for part in key.split("."):
        inside = content.get("init_args") if isinstance(content, dict) and part not in content else content
        if not isinstance(inside, dict) or part not in inside:
            return False
        content = inside[part]
    return True
