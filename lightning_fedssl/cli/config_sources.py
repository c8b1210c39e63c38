"""Finds the configuration file that sets a key, for error messages, and the files that hold one group of keys.

A group of keys (``trainer``, ``model``, ``data``) can be in its own file: ``--data data.yaml``, or ``data: data.yaml``
in a configuration file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from lightning_fedssl.cli.config_files import find_config, find_suite
from lightning_fedssl.cli.strict_yaml import check_yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C is ten times as fast; PyYAML can be installed without it."""

GROUPS = ("trainer", "model", "data")
"""The keys whose values may be files."""

_FILES = ("--config", "-c", "--suite")
"""Options that name a file of keys."""


def file_of_key(key: str, arguments: Sequence[str]) -> str:
    """The name of the file that sets a key last; empty if an option or variable does, or no file.

    Args:
        key: The key with its parents, such as ``trainer.max_rounds``.
        arguments: The arguments of the command.
    """
    options = list(options_of(arguments))
    variable = f"__{key.upper().replace('.', '__')}"
    on_command_line = any(f"{option}.".startswith(f"{key}.") for option, _ in options)
    if on_command_line or any(name.endswith(variable) for name in os.environ):
        return ""
    for option, value in reversed(options):
        parts = _below(option, key.split("."))
        if parts is not None and (found := _search(value, content_of(option, value), parts)):
            return found
    return ""


def group_files(arguments: Sequence[str]) -> Iterator[Path]:
    """The files that hold one group of keys, of all arguments and of the configuration files that they name."""
    for option, value in options_of(arguments):
        if option in GROUPS and _is_file(value):
            yield Path(value)
        if option == "config" and isinstance(content := content_of(option, value), dict):
            yield from (Path(content[group]) for group in GROUPS if _is_file(content.get(group)))


def options_of(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option's name without dashes, and its value; ``+=``, which appends to a list, counts as ``=``.

    Args:
        arguments: The arguments of a command.
    """
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if is_option(argument):
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            yield {"-c": "config"}.get(name, name.lstrip("-").rstrip("+")), value if equals else following


def is_option(argument: str) -> bool:
    """Whether an argument is an option, and not a value such as ``-1`` or ``-.5``."""
    return argument.startswith("-") and not re.match(r"-\.?\d", argument)


def with_options_last(arguments: Sequence[str]) -> list[str]:
    """The arguments with the options that stand before a file repeated after it, so that they win over it.

    The parser applies arguments in their order. These options also keep their place, because a file may give arguments
    of a class that an option before it names. Options that append to a list (``+=``) are not repeated but moved.

    Args:
        arguments: The arguments of a command. A suite counts as a file.
    """
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if is_option(argument):
            parts.append([])
        parts[-1].append(argument)
    files = [number for number, part in enumerate(parts) if _name_of(part) in _FILES]
    before = parts[1 : files[-1]] if files else []
    options = [part for part in before if _name_of(part) not in _FILES]
    if not options:
        return list(arguments)
    first = [part for part in before if not _name_of(part).endswith("+")]
    ordered = [parts[0], *first, parts[files[-1]], *options, *parts[files[-1] + 1 :]]
    return [argument for part in ordered for argument in part]


def _name_of(part: Sequence[str]) -> str:
    """The option that a part of the command line begins with; empty if it begins with none."""
    return part[0].partition("=")[0] if part else ""


def _below(option: str, parts: list[str]) -> list[str] | None:
    """The part of a key that a file given by this option must contain; None if it cannot set the key."""
    if option == "config":
        return parts
    return parts[1:] if option in GROUPS and parts[0] == option and len(parts) > 1 else None


def content_of(option: str, value: str) -> Any:
    """The content of the file that an option names; None if it names none that can be read.

    Args:
        option: The option without dashes.
        value: Its value.
    """
    try:
        if option in ("config", "suite"):
            path = find_config(value) if option == "config" else find_suite(value)
            return _with_files_beside(path, _load(path))
        return _load(Path(value)) if option in GROUPS and _is_file(value) else None
    except TypeError:
        return None


def _with_files_beside(path: Path, content: Any) -> Any:
    """The content of a configuration; files of groups that it names are relative to its folder, as for the parser."""
    if not isinstance(content, dict):
        return content
    files = {group: str(path.parent / content[group]) for group in GROUPS if isinstance(content.get(group), str)}
    return {**content, **{group: file for group, file in files.items() if _is_file(file)}}


def lookup(content: Any, key: str) -> Iterator[Any]:
    """The value of a key in the content of a file, or nothing if the file does not set it.

    Args:
        content: The content. It may write the key's parents as nested mappings or with dots; the arguments of a class
            may stand below ``init_args``.
        key: The key with its parents, without ``init_args``.
    """
    if _is_file(content):
        content = _load(Path(content))
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        name = str(name).replace(".init_args", "")
        if name == key:
            yield value
        elif name == "init_args":
            yield from lookup(value, key)
        elif key.startswith(f"{name}."):
            yield from lookup(value, key.removeprefix(f"{name}."))


def _load(path: Path) -> Any:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, TypeError, ValueError, yaml.YAMLError):
        return None  # the parser reports the error


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    """The content of a file, which is checked first: aliases could be endless, and the loader in C has no limit."""
    check_yaml(text)
    return yaml.load(text, Loader=_LOADER)


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and value.endswith((".yaml", ".yml")) and Path(value).is_file()


def _search(name: str, content: Any, parts: list[str]) -> str:
    """The file in which a key is found, starting at the content of one; empty if the key is not there."""
    if not parts:
        return name
    if _is_file(content):
        return _search(content, _load(Path(content)), parts)
    if not isinstance(content, dict):
        return ""
    # A file may write a key's parents as nested mappings or with dots.
    for count in range(1, len(parts) + 1):
        inner = ".".join(parts[:count])
        if inner in content and (found := _search(name, content[inner], parts[count:])):
            return found
    return ""
