"""Hides installed packages, as a machine with a GPU may lack them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

MODULES = {"scikit-learn": "sklearn"}
"""Where the module has another name than the package."""


def hide_packages(*packages: str) -> None:
    """From now on these can neither be imported nor found.

    Args:
        packages: Names of distributions.
    """
    for package in packages:
        sys.modules[MODULES.get(package, package)] = None  # type: ignore[assignment]

    def without(find: Callable[[str], Any]) -> Callable[[str], Any]:
        def found(package: str) -> Any:
            if package in packages:
                raise importlib.metadata.PackageNotFoundError(package)
            return find(package)

        return found

    for name in ("version", "distribution"):
        setattr(importlib.metadata, name, without(getattr(importlib.metadata, name)))
