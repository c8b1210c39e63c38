"""The keys of the commands, read from the sources as text, so that a misspelt key is refused without slow imports."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_OWNERS = {"trainer": ("trainer/trainer.py", "FederatedTrainer"), "data": ("data/datamodule.py", "FederatedDataModule")}
_PLAIN = ("config", "seed_everything", "json", "ckpt_path", "print_config", "help", "model", *_OWNERS)


def keys_of_runs() -> list[str]:
    """The keys of ``fit``, ``validate``, ``test`` and ``predict`` without ``--``; those of methods are left out."""
    return [*_PLAIN, *(f"{group}.{name}" for group in _OWNERS for name in _arguments(*_OWNERS[group]))]


def keys_of_script(command: str) -> list[str]:
    """The keys of ``compare``, ``partition``, ``export`` or ``deploy`` without ``--``.

    Args:
        command: The command.
    """
    source = (_PACKAGE / "cli" / f"{command}.py").read_text(encoding="utf-8")
    return [*dict.fromkeys(re.findall(r'add_argument\([^)]*?"--([a-z_]+)"', source)), "help"]


def misspelt_key(arguments: list[str]) -> str | None:
    """The message for the first key of trainer or data that does not exist and resembles one that does; else None.

    Args:
        arguments: The command line after the program's name.
    """
    known = keys_of_runs()
    for argument in arguments:
        name = re.split(r"\+?=|\+$", argument.removeprefix("--"))[0] if argument.startswith("--") else ""
        key = ".".join(name.split(".")[:2])
        if key.partition(".")[0] in _OWNERS and key not in known and not key.endswith(".help"):
            same_group = [k for k in known if k.startswith(key.partition(".")[0] + ".")]
            if close := difflib.get_close_matches(key, same_group, n=1, cutoff=0.8):
                return f"there is no key {key}; did you mean {close[0]}?"
    return None


def _arguments(file: str, name: str) -> list[str]:
    """The arguments of a class's constructor."""
    tree = ast.parse((_PACKAGE / file).read_text(encoding="utf-8"))
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (made,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return [argument.arg for argument in (*made.args.args[1:], *made.args.kwonlyargs)]
