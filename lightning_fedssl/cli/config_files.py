"""Finds configuration files and suites by path or by name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

CONFIGS = Path(__file__).parent.parent / "configs"
"""The folder of the configurations that come with the package; its folder ``suites`` has the
suites."""


def find_config(name: str, folder: Path = CONFIGS) -> Path:
    """The file of ``--config``, or the suite of ``compare``: a path, or a name in the package.

    Args:
        name: The path or the name.
        folder: Where the package's files are.

    Raises:
        TypeError: If there is neither, and the message suggests one, or if the file is not text.
            (jsonargparse expects this type.)
    """
    for path in (Path(name), folder / name):
        if os.path.isfile(path):  # Path.is_file raises where a name is too long
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TypeError("this is not text in UTF-8, so not YAML") from error
            return path
    files = {path.name: key for key, path in package_files().items()}
    close = difflib.get_close_matches(Path(name).name, files, n=1, cutoff=0.8)
    hint = "lightning-fedssl configs and suites list those of the package"
    if close:
        found = files[close[0]]
        command = "compare" if found.startswith("suites/") else "fit --config"
        hint = f"did you mean lightning-fedssl {command} {found.removeprefix('suites/')}?"
    raise TypeError(f"there is no such file; {hint}")


def package_files(folder: Path = CONFIGS) -> dict[str, Path]:
    """The YAML files of the package by their names relative to a folder, sorted.

    Args:
        folder: The folder.
    """
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
