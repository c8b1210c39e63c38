"""The command line: Lightning's, with this package's trainer, and a module for each command of its
own.
"""

from lightning_fedssl.cli.entry import main
from lightning_fedssl.cli.lightning_cli import FederatedCLI

__all__ = ["FederatedCLI", "main"]
