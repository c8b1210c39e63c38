"""Errors of the command line in one line.

jsonargparse's messages are trees: a line for each key and class on the way to the error, and one
for each type that was tried.
"""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

_KEY = re.compile(r'Parser key "([^"]+)":')
_CLASS = re.compile(r"class_path[ =]'(?:\w+\.)*(\w+)'")
_VALUE = re.compile(
    r"(?:Got|Given) value: ([^\s({\[;]{1,100})[^\s({\[;]*(?=\. Got value|;|$)", re.MULTILINE
)
_EXPECTED = re.compile(r"Expected an? (?:<class '|typing\.Literal\[)?(?:\w+\.)*(.*?)(?:'>|\])?$")
_AROUND = re.compile(
    r'^- |Parser key "[^"]+":|Type .*? expects a function or a callable class: |Errors:$'
    r"|\.? *(?:Got|Given) value: [^;]*|Problem with given class_path .*|Given value type: .*"
    r"|Does not validate against .*|Subtypes: .*|Not of type Path.*|Expected a path but .*"
    r"|Import path .* subclass of Lightning.*|Not a valid subclass.*|Does not implement.*"
    r"|, but got NestedArg.*|Multiple subclasses.*|Subclass types expect .*|a class path \(str\)"
    r"|a dict with.*|.*NoneType'>$"
)
"""What only says how the error was met."""

_FUNCTION = "give the options of a function as {class_path: FUNCTION, init_args: {...}}"
_LISTS = {"list", "tuple", "Sequence"}


def one_line(message: str) -> str:
    """A message of jsonargparse in one line: the keys, what is wrong, and what is expected.

    Args:
        message: The message, with what it suggests at its end; the lines of others are joined.
    """
    start, _, tree = message.partition('Parser key "')
    if not tree:
        return " ".join(message.split())
    wrong: list[str] = []
    expected: list[str] = []
    owner = ""
    for line in message.removeprefix(start).splitlines():
        owner = next(iter(_CLASS.findall(line)), owner)
        text = _AROUND.sub("", line.strip()).strip(" ;")
        text = text.replace("Expected a dot import path string:", "no class here is called")
        text = text.replace("Dict must include a class_path and optionally init_args", _FUNCTION)
        if found := _EXPECTED.match(text):
            expected.append(found[1])
        elif text:
            wrong.append(
                f"{owner}: {text}" if owner and text.startswith(("Option", "No ", "the ")) else text
            )
    value = next(iter(_VALUE.findall(message)), "")
    if not (expected or wrong):
        expected.append("the name of a class")
    if expected and "did you mean" not in " ".join(wrong):
        wrong.append(_wanted(expected, value))
    elif value and value not in " ".join(wrong):
        wrong.append(f"given {value}")
    keys = ".".join(dict.fromkeys(_KEY.findall(message)))
    return f"{start}{keys}: {'; '.join(dict.fromkeys(wrong))}"


def _wanted(types: list[str], value: str) -> str:
    """What would have been right instead of a value."""
    if value and _LISTS.issuperset(types):
        return f"give a list: [{value}]"
    return f"expected {' or '.join(dict.fromkeys(types))}{f', not {value}' if value else ''}"


class ScriptParser(argparse.ArgumentParser):
    """The parser of a command without keys: its errors are one line, as those of the other
    commands.
    """

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
