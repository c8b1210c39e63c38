"""The ``new`` command: writes a method of the user's own, with a configuration and tests, to start
from.
"""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_fedssl.cli import listing
from lightning_fedssl.cli.parser import Parser
from lightning_fedssl.metrics.evaluation import snake_case

DESCRIPTION = """\
Writes a method of your own to start from: a file with its class, a configuration and tests. It
begins as FedAvg with FixMatch at the clients; change what your paper changes.
docs/adding_a_method.md explains what a method can override.

  lightning-fedssl new MyMethod
  lightning-fedssl fit --config my_method.yaml
  python -m pytest test_my_method.py
"""

_TEMPLATES = Path(__file__).parent / "templates"
"""The folder of the method ``MyMethod`` that is copied."""


def main(arguments: Sequence[str]) -> int:
    """Run ``new``.

    Args:
        arguments: What follows the command's name.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If the name is not usable.
        FileExistsError: If one of the files is there already.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    parser = Parser.of_command("new", DESCRIPTION)
    parser.add_argument(
        "name", type=str, nargs="?", default="", help="The name of the class, such as MyMethod."
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="Where to write; the current folder if left out.",
    )
    options = parser.parse_args(list(arguments))
    for path in write_method(options.name, options.folder):
        sys.stdout.write(f"written: {path}\n")
    module = snake_case(options.name)
    where = "" if options.folder == Path() else f"cd {shlex.quote(str(options.folder))} && "
    sys.stdout.write(f"next: {where}lightning-fedssl fit --config {module}.yaml\n")
    return 0


def write_method(name: str, folder: Path) -> list[Path]:
    """Write a method, its configuration and its tests.

    Args:
        name: The name of the class.
        folder: Where to write; it is made.

    Returns:
        The files.

    Raises:
        ValueError: If the name is not usable.
        FileExistsError: If one of the files is there already.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise ValueError(
            f"{name!r} is not a name of a class: give letters and digits, the first a capital: "
            "MyMethod"
        )
    module = snake_case(name)
    if keyword.iskeyword(module) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} would be the word {module!r} of Python's own language: give another name"
        )
    files = {
        folder / path.name.replace("my_method", module): path
        for path in sorted(_TEMPLATES.glob("*my_method.*"))
    }
    if existing := [str(path) for path in files if path.exists()]:
        raise FileExistsError(
            f"{existing[0]} is there already: give another name, or another --folder"
        )
    if name in listing.rows_of("methods") or find_spec(module) is not None:
        raise ValueError(
            f"there is a method or a module {module} of this name already: give another name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in files.items():
        text = template.read_text(encoding="utf-8")
        path.write_text(
            text.replace("my_method", module).replace("MyMethod", name), encoding="utf-8"
        )
    return list(files)
