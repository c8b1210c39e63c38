"""The command line: the parser, its messages, and one module for each command that is not Lightning's own.

``main`` and ``FederatedCLI`` can be imported from here. They are imported when they are first used, because they import
Lightning, and the listing commands answer without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fedssl.cli.entry import COMMANDS as COMMANDS
    from lightning_fedssl.cli.entry import FederatedCLI as FederatedCLI
    from lightning_fedssl.cli.entry import find_config as find_config
    from lightning_fedssl.cli.entry import main as main

_OFFERED = ("COMMANDS", "FederatedCLI", "find_config", "main")


def __getattr__(name: str) -> Any:
    if name in _OFFERED:
        return getattr(import_module("lightning_fedssl.cli.entry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
