"""Keys of classes from the environment: ``FEDSSL_FIT__MODEL__FREEZE=convs`` is ``--model.freeze convs`` of ``fit``.

jsonargparse reads variables of keys that its parser has. The arguments of a method, a partition or another class are
keys only after the class is chosen, so their variables are added to the command line here, after the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fedssl.cli.config_files import find_config
from lightning_fedssl.cli.keys import keys_of_runs


def with_environment(arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command line with options for the variables of keys of classes; files and options have precedence.

    Args:
        arguments: What follows the program's name, from the command on.
        variables: The environment.
    """
    prefix = f"FEDSSL_{arguments[0].upper()}__"
    found = {n.removeprefix(prefix).lower().replace("__", "."): v for n, v in variables.items() if n.startswith(prefix)}
    keys = {key: value for key, value in sorted(found.items()) if _belongs_to_a_class(key)}
    if not keys:
        return list(arguments)
    places = [i for i, a in enumerate(arguments) if a in ("--config", "-c") or a.startswith("--config=")]
    files = [_content(arguments[i].partition("=")[2] or arguments[i + 1]) for i in places]
    end = max((i + (2 if arguments[i] in ("--config", "-c") else 1) for i in places), default=1)
    options = [f"--{key}={value}" for key, value in keys.items() if not any(_has(file, key) for file in files)]
    return [*arguments[:end], *options, *arguments[end:]]


def _belongs_to_a_class(key: str) -> bool:
    """Whether a key is an argument of a class that another key names: ``model.freeze``, ``data.partition.alpha``."""
    group, *rest = key.split(".")
    return bool(rest) and (group == "model" or (len(rest) > 1 and f"{group}.{rest[0]}" in keys_of_runs()))


def _content(name: str) -> Any:
    """The content of a configuration file; nothing for one that cannot be read, which the parser reports."""
    try:
        return yaml.safe_load(Path(find_config(name)).read_text(encoding="utf-8"))
    except (OSError, TypeError, UnicodeError, yaml.YAMLError):
        return {}


def _has(content: Any, key: str) -> bool:
    """Whether a file sets a key; the arguments of a class stand below ``init_args``."""
    for part in key.split("."):
        inside = content.get("init_args") if isinstance(content, dict) and part not in content else content
        if not isinstance(inside, dict) or part not in inside:
            return False
        content = inside[part]
    return True
