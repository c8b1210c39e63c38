"""The keys of the commands, read from the sources as text, so that a misspelt key is refused without slow imports."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fedssl.cli.config_sources import content_of, options_of, with_options_last
from lightning_fedssl.cli.environment import keys_of_variables
from lightning_fedssl.cli.signatures import arguments_of

COMMANDS = ("fit", "validate", "test", "predict")
"""The commands that run a trainer."""

SCRIPTS = ("compare", "partition", "export", "deploy", "new")
"""The commands with a program of their own."""

_PACKAGE = Path(__file__).resolve().parent.parent
OWNERS = {
    "trainer": "lightning_fedssl.trainer.FederatedTrainer",
    "data": "lightning_fedssl.data.federated_data.FederatedData",
}
"""The classes whose arguments are the keys of a group."""

_PLAIN = ("config", "seed_everything", "json", "ckpt_path", "print_config", "help", "model", *OWNERS)
_GROUPS = ("model", *OWNERS)
_FROM_OTHER_KEYS = ("model", "datamodule")
"""Arguments of the trainer's methods whose values are the objects of the keys ``model`` and ``data``."""


def keys_of_runs(command: str = "fit") -> list[str]:
    """The keys of a command that runs a trainer without ``--``; those of methods are left out.

    Args:
        command: One of :data:`COMMANDS`.
    """
    own = [name for name in arguments_of(OWNERS["trainer"], command) or () if name not in _FROM_OTHER_KEYS]
    groups = [f"{group}.{name}" for group, owner in OWNERS.items() for name in arguments_of(owner) or ()]
    return [*dict.fromkeys([*_PLAIN, *own]), *groups]


def keys_of_script(command: str) -> list[str]:
    """The keys of ``compare``, ``partition``, ``export`` or ``deploy`` without ``--``.

    Args:
        command: The command.
    """
    source = (_PACKAGE / "cli" / f"{command}.py").read_text(encoding="utf-8")
    return [*dict.fromkeys(re.findall(r'add_argument\([^)]*?"--([a-z_]+)"', source)), "help"]


def misspelt_key(command: str, arguments: Sequence[str]) -> str | None:
    """The message for the first key that does not exist and resembles one that does; None if there is none.

    The keys of a command, of trainer and data and of this package's classes are checked, on the command line, in
    configuration files, in suites and in environment variables. Other keys are checked by the parser, which needs slow
    imports.

    Args:
        command: The command.
        arguments: The command line after the command.
    """
    owners = dict(OWNERS)
    for file, full_key, value in settings(command, arguments):
        key = without_objects(full_key)
        parent, _, name = key.rpartition(".")
        known = arguments_of(owners[parent]) if parent in owners else _keys_of(command) if not parent else ()
        close = [] if not known or name in (*known, "help") else difflib.get_close_matches(name, known, n=1)
        if close:
            return f"{file}: {_message(parent, owners, name, close[0])}".removeprefix(": ")
        if isinstance(value, str) and key not in OWNERS:
            owners[key] = value
    return _unknown_variable(command, os.environ)


def as_typed(message: str, arguments: Sequence[str]) -> str:
    """A message about a key that does not exist, with the options as they are typed; unchanged if no option sets it.

    Args:
        message: Begins with ``there is no key KEY`` or ``KEY: CLASS takes no NAME``.
        arguments: The command line.
    """
    match = re.match(r"(?:there is no key|([\w.]+): \w+ takes no) ([\w.]+)", message)
    if match is None:
        return message
    name, key = match[2], ".".join(filter(None, match.groups()))
    options = (argument.partition("=")[0].rstrip("+") for argument in arguments if argument.startswith("--"))
    option = next((option for option in options if without_objects(option.removeprefix("--")) == key), None)
    if option is None:
        return message
    siblings = option.removesuffix(name)
    meant = re.sub(
        r"(?<=did you mean )[\w.]+(?=\?)", lambda found: ("--" if "." in found[0] else siblings) + found[0], message
    )
    return meant.replace(f"there is no key {name}", f"there is no option {option}", 1)


def without_objects(key: str) -> str:
    """A key without what may stand between an object and its arguments, and without the signs of appending."""
    return ".".join(part.rstrip("+") for part in key.split(".") if part not in _OF_OBJECTS)


def _unknown_variable(command: str, variables: Mapping[str, str]) -> str | None:
    """The message for the first variable of a command whose key does not exist; None if there is none.

    The parser ignores such a variable. Keys of methods and other classes become options, which the parser checks.
    """
    prefix = f"FEDSSL_{command.upper()}_"
    given = sorted(name for name in variables if name.startswith(prefix))
    if not given or command not in (*COMMANDS, "compare", "partition", "export"):
        return None
    known = [*_keys_of(command), *(key for key in keys_of_runs() if "." in key)]
    for name in given:
        key = name.removeprefix(prefix).removeprefix("_").lower().replace("__", ".")
        ours = name.startswith(f"{prefix}_")
        if not (ours and (key.startswith("model.") or _first_of(key) in known)):
            by_name = {each.replace(".", "_"): each for each in known}
            close = difflib.get_close_matches(key.replace(".", "_"), by_name, n=1, cutoff=0.8)
            meant = f"{prefix}_{by_name[close[0]].upper().replace('.', '__')}" if close else ""
            rule = f"{prefix}_ and the key in capitals, with two underscores for each dot"
            return f"{name}: there is no such variable; " + (f"did you mean {meant}?" if meant else f"give {rule}")
    return None


def _first_of(key: str) -> str:
    """The part of a key that the command knows: with its group, without the arguments of a class."""
    return ".".join(key.split(".")[: 2 if key.startswith(tuple(f"{group}." for group in OWNERS)) else None])


_OF_OBJECTS = ("init_args", "class_path", "dict_kwargs")
"""Parts of a key that stand between an object and its arguments."""


def _message(parent: str, owners: Mapping[str, str], name: str, close: str) -> str:
    if parent in owners and parent not in OWNERS:
        return f"{parent}: {owners[parent].rpartition('.')[2]} takes no {name}; did you mean {close}?"
    group = f"{parent}." if parent else ""
    return f"there is no key {group}{name}; did you mean {group}{close}?"


def _keys_of(command: str) -> tuple[str, ...]:
    """The keys of a command that have no parent; none for a command whose keys are not known here."""
    if command == "compare":
        return (*keys_of_script(command), *(arguments_of("lightning_fedssl.comparison.suite.Suite") or ()), *_GROUPS)
    if command in ("partition", "export"):
        return (*keys_of_script(command), *_PLAIN)
    return (*_PLAIN, *(arguments_of(OWNERS["trainer"], command) or ())) if command in COMMANDS else ()


def settings(command: str, arguments: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """All keys in the order in which they are set: the file (empty for an option), the key and its value.

    The value of a key whose value is an object is the name of its class.
    """
    if command == "compare" and arguments and not arguments[0].startswith("-"):
        yield from _of_suite(arguments[0])
    for option, value in options_of(with_options_last(arguments)):
        content = content_of(option, value)
        if content is not None:
            yield from _inside(value, "" if option == "config" else option, content)
        elif option != "config":
            yield "", option, value
    for variable, (key, value) in keys_of_variables(command, os.environ).items():
        yield variable, key, value


def _of_suite(name: str) -> Iterator[tuple[str, str, Any]]:
    """The keys of a suite, and those that its overrides set in the configuration of each entry."""
    suite = content_of("suite", name)
    for key in suite if isinstance(suite, dict) else ():
        yield name, str(key), None
    for group in _mappings(suite, "groups"):
        for entry in _mappings(group, "entries"):
            files = entry.get("config", "")
            for file in files if isinstance(files, list) else [files]:
                yield from _inside(str(file), "", content_of("config", str(file)))
            for part in (suite, group, entry):
                yield from _inside(name, "", part.get("overrides"))


def _mappings(owner: Any, key: str) -> list[dict[str, Any]]:
    values = owner.get(key) if isinstance(owner, dict) else None
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _inside(file: str, key: str, content: Any) -> Iterator[tuple[str, str, Any]]:
    """The keys of a part of a file."""
    if isinstance(content, list):
        yield file, key, content
        for item in content:
            yield from _inside(file, key, item)
    elif isinstance(content, dict):
        if key:
            yield file, key, content.get("class_path")
        for name, value in content.items():
            if name != "class_path":
                yield from _inside(file, f"{key}.{name}".lstrip("."), value)
    elif (found := content_of(key, content) if isinstance(content, str) and key in _GROUPS else None) is not None:
        yield from _inside(content, key, found)
    elif key:
        yield file, key, content
