"""The command line: Lightning's, with this package's trainer, and a module for each command of its
own.
"""

from typing import TYPE_CHECKING, Any

from lightning_fedssl.cli.entry import main

if TYPE_CHECKING:
    from lightning_fedssl.cli.lightning_cli import FederatedCLI

__all__ = ["FederatedCLI", "main"]


def __getattr__(name: str) -> Any:
    """The class that imports Lightning, which ``--help`` does without."""
    if name != "FederatedCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_fedssl.cli.lightning_cli import FederatedCLI

    return FederatedCLI
