"""Finds configuration files and suites by path or name, without slow imports, so that a misspelt name fails fast."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import lightning_fedssl

_SUITES = "suites/"


def find_config(name: str) -> Path:
    """The file of ``--config``: a path, or a configuration of that name in the package.

    Raises:
        TypeError: If there is neither; the message suggests one. (jsonargparse expects this type.)
    """
    files = package_files()
    ours = {name: path for name, path in files.items() if not name.startswith(_SUITES)}
    if not os.path.isfile(name) and name not in ours and f"{_SUITES}{Path(name).name}" in files:
        raise TypeError(f"this is a suite of several runs: lightning-fedssl compare {Path(name).name}")
    return _find(name, ours, "configs")


def find_suite(name: str) -> Path:
    """The suite file of ``compare``: a path, or a suite of that name in the package.

    Raises:
        TypeError: If there is neither; the message suggests one.
    """
    files = package_files()
    ours = {path.name: path for name, path in files.items() if name.startswith(_SUITES)}
    if not os.path.isfile(name) and name in files and name.removeprefix(_SUITES) not in ours:
        raise TypeError(f"this is a configuration of one run: lightning-fedssl fit --config {name}")
    return _find(name if os.path.isfile(name) else name.removeprefix(_SUITES), ours, "suites")


def package_files() -> dict[str, Path]:
    """The YAML files of the package by their names relative to its folder ``configs``, sorted."""
    folders = [Path(folder, "configs") for folder in lightning_fedssl.__path__]
    found = {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.rglob("*.yaml")}
    return dict(sorted(found.items()))


def _find(name: str, ours: dict[str, Path], listing: str) -> Path:
    path = Path(name)
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long
        path = ours.get(name, path)
    if not os.path.isfile(path):
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
        known = f"did you mean {close[0]}?" if close else f"lightning-fedssl {listing} lists those of the package"
        raise TypeError(f"there is no such file; {known}")
    return path
