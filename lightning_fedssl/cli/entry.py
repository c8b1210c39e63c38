"""The entry point of the command line: runs a command, and prints errors that the user can fix in one line."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fedssl.cli import messages
from lightning_fedssl.cli.config_files import find_config
from lightning_fedssl.cli.environment import with_environment, without_effect
from lightning_fedssl.cli.keys import COMMANDS, SCRIPTS
from lightning_fedssl.cli.log_output import interrupted, is_first_on_machine, show_log
from lightning_fedssl.cli.parser import wants_traceback

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType

    from lightning_fedssl.cli.lightning_cli import FederatedCLI as FederatedCLI
    from lightning_fedssl.data.datamodule import FederatedDataModule

__all__ = ["COMMANDS", "FederatedCLI", "find_config", "main"]


def main(args: ArgsType = None, datamodule_class: type[FederatedDataModule] | None = None) -> int:
    """Run the command line.

    For a data module of your own, put two lines into a script and call it as you would call ``lightning-fedssl``::

        from lightning_fedssl.cli import main
        main(datamodule_class=MyData)

    Args:
        args: What follows the program's name; the process's own arguments if left out.
        datamodule_class: See :class:`FederatedCLI`; :class:`FederatedDataModule` if left out.

    Returns:
        The exit code: 0, or 1 after an error, which is printed in one line. ``FEDSSL_TRACEBACK=1`` prints its
        traceback.

    Raises:
        SystemExit: With code 2 if the arguments are wrong, with 0 after ``--help`` or ``--print_config``.
    """
    show_log()
    arguments = sys.argv[1:] if args is None else args
    if isinstance(arguments, list) and arguments[:1] and arguments[0] in (*COMMANDS, "partition"):
        for warning in without_effect(arguments, os.environ):
            logging.getLogger(__name__).warning(warning)
    try:
        if isinstance(arguments, list) and arguments[:1] == ["partition"]:
            arguments = with_environment(arguments, os.environ)
        if isinstance(arguments, list) and arguments[:1] and arguments[0] in SCRIPTS:
            return _without_trainer(arguments, datamodule_class)
        if isinstance(arguments, list) and arguments[:1] and arguments[0] in COMMANDS:
            expanded = with_environment(arguments, os.environ)
            if expanded != arguments:
                warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python")
                args = expanded
        from lightning_fedssl.cli.lightning_cli import FederatedCLI

        FederatedCLI(args=args, **_given(datamodule_class))
    except KeyboardInterrupt:
        return interrupted()
    except Exception as error:
        command = str(arguments[0]) if isinstance(arguments, list) and arguments else ""
        message = None if wants_traceback() else messages.describe(error, command)
        if message is None:
            raise
        if getattr(error, "reports", is_first_on_machine()):
            sys.stderr.write(f"error: {_rank()}{message}\n")
        return 1
    return 0


def _given(datamodule_class: type[FederatedDataModule] | None) -> dict[str, Any]:
    """The argument for a data module of the user's own; without one, each command takes its default."""
    return {} if datamodule_class is None else {"datamodule_class": datamodule_class}


def _without_trainer(arguments: list[str], datamodule_class: type[FederatedDataModule] | None) -> int:
    """Run a command that is not a method of the trainer; two of them take a data module."""
    command = import_module(f"lightning_fedssl.cli.{arguments[0]}")
    given = _given(datamodule_class) if arguments[0] in ("compare", "partition") else {}
    return int(command.main(arguments[1:], **given))


def _rank() -> str:
    """Names the rank where it is not the first."""
    return "" if is_first_on_machine() else f"rank {os.environ.get('RANK') or os.environ.get('LOCAL_RANK')}: "


def __getattr__(name: str) -> Any:
    """Import ``FederatedCLI`` when it is first used: it imports Lightning, which takes seconds."""
    if name == "FederatedCLI":
        from lightning_fedssl.cli.lightning_cli import FederatedCLI

        return FederatedCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
