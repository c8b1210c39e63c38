"""Refuses numbers, texts, truth values and choices of a wrong type in the parser's words, without slow imports."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser

from lightning_fedssl.cli.config_sources import is_option
from lightning_fedssl.cli.keys import OWNERS, settings, without_objects
from lightning_fedssl.cli.parser_messages import explain
from lightning_fedssl.cli.signatures import annotations_of

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str, "Literal": Literal}
"""What an annotation may name so that its values can be checked here; the parser checks the others."""


def wrong_value(command: str, arguments: Sequence[str]) -> str | None:
    """The message for the first value that its argument does not accept; None if there is none.

    Arguments of trainer, data and of this package's methods are checked, on the command line, in configuration files
    and in environment variables. Other values are checked by the parser, which needs slow imports.

    Args:
        command: The command.
        arguments: The command line after the command.
    """
    owners = dict(OWNERS)
    for source, full_key, value in settings(command, arguments):
        key = without_objects(full_key)
        group, _, name = key.partition(".")
        if key == "model" and isinstance(value, str):
            owners["model"] = value
        annotation = (annotations_of(owners[group]) or {}).get(name) if group in owners else None
        problem = _refusal(key, annotation, value) if annotation and not _is_left_out(value) else None
        if problem:
            return f"{source}: {problem}".removeprefix(": ")
    return None


def _is_left_out(value: Any) -> bool:
    """Whether an option has no value, or one that stands for the default; both are for the parser."""
    return value is None or (isinstance(value, str) and (value in ("", "null", "~") or is_option(value)))


def _refusal(key: str, annotation: str, value: Any) -> str | None:
    """Why a key does not accept a value, if its annotation names simple types only."""
    names = {node.id for node in ast.walk(ast.parse(annotation, mode="eval")) if isinstance(node, ast.Name)}
    if not names or not names <= _SIMPLE.keys():
        return None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=eval(annotation, dict(_SIMPLE)))  # of this package's sources
    try:
        if isinstance(value, str):
            parser.parse_args([f"--{key}={value}"])
        else:
            parser.parse_object(reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value))
    except ArgumentError as error:
        return explain(str(error))
    return None
