"""The entry point of the command line: runs a command, and prints errors that the user can fix in
one line.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from lightning_fedssl.cli.commands import HABITS, LISTS, SCRIPTS, TRAINER, help_text
from lightning_fedssl.cli.log_output import is_first_on_machine, show_log
from lightning_fedssl.storage.optional import how_to_install
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

READS_CHECKPOINTS = ("validate", "test", "predict")
"""Commands that take the configuration of a checkpoint's run folder if none is named."""


def main(
    args: Sequence[str] | None = None, datamodule_class: type[FederatedDataModule] | None = None
) -> int:
    """Run the command line.

    For a data module of your own, put two lines into a script and call it as you would call
    ``lightning-fedssl``::

        from lightning_fedssl.cli import main
        main(datamodule_class=MyData)

    Args:
        args: What follows the program's name; the process's own arguments if left out.
        datamodule_class: See :class:`FederatedCLI`; :class:`FederatedDataModule` if left out.

    Returns:
        The exit code: 0, 2 after an error that the user can fix, which is printed in one line, 130
            after Ctrl-C, or 143 after SIGTERM, also if ``fit`` has saved its round.
        ``FEDSSL_TRACEBACK=1`` prints the traceback of the error.

    Raises:
        SystemExit: With code 2 if the arguments are wrong, with 0 after a command's ``--help`` or
            ``--print_config``, with 143 after a SIGTERM that ends the command at once.
    """
    show_log()
    # python -m searches this folder for the user's classes, a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _run(list(sys.argv[1:] if args is None else args), datamodule_class)
    except KeyboardInterrupt:
        message = "interrupted"
        code = 130
    except Exception as error:
        # Outermost first: jsonargparse wraps the errors of constructors.
        found = None
        cause: BaseException | None = error
        while cause is not None and not found:
            found = _message(cause)
            cause = cause.__cause__
        if not found or os.environ.get("FEDSSL_TRACEBACK", "0") != "0":
            raise
        message = f"error: {found}"
        code = 2
    if is_first_on_machine():
        sys.stderr.write(f"{message}\n")
    return code


def _run(arguments: list[str], datamodule_class: type[FederatedDataModule] | None) -> int:
    """Run a command."""
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "--version"):
        text = f"lightning-fedssl {__version__}\n" if command == "--version" else help_text()
        sys.stdout.write(text)
        return 0
    known = [*TRAINER, *SCRIPTS, *LISTS]
    if command.startswith("-") and not {*known} & {*arguments}:
        raise ValueError(f"a command comes first: lightning-fedssl fit {' '.join(arguments)}")
    if command not in known and not command.startswith("-"):
        close = difflib.get_close_matches(command, known, n=1) or [", ".join(known)]
        meant = HABITS.get(command, close[0])
        raise ValueError(f"there is no command {command}; did you mean {meant}?")
    arguments = _with_source(arguments)
    if command in LISTS:
        listing = import_module("lightning_fedssl.cli.listing")
        sys.stdout.write(listing.show(command))
        return 0
    if command == "predict" and any(word.partition("=")[0] == "--rows" for word in arguments):
        script = import_module("lightning_fedssl.cli.predict_rows")
        return int(script.main(arguments[1:]))
    if command in READS_CHECKPOINTS and (saved := _config_of_run(arguments)):
        arguments = [command, f"--config={saved}", *arguments[1:]]
    given: dict[str, Any] = {"datamodule_class": datamodule_class} if datamodule_class else {}
    if command in SCRIPTS:
        script = import_module(f"lightning_fedssl.cli.{command}")
        reads_data = command in ("compare", "partition")
        return int(script.main(arguments[1:], **(given if reads_data else {})))
    if arguments == ["fit"]:
        arguments = ["fit", "--config", "semifl_digits.yaml"]
    from lightning_fedssl.cli.lightning_cli import FederatedCLI

    trainer: Any = FederatedCLI(arguments, **given).trainer
    # One rank says it: Lightning and torchrun kill the other ranks when one has failed.
    stopped_by = trainer.stopped_by if trainer.is_global_zero else 0
    return 128 + stopped_by if stopped_by else 0


def _words(arguments: list[str]) -> list[str]:
    """The arguments, with options apart from the values that follow their ``=``."""
    parts = (word.split("=", 1) if word.startswith("-") else [word] for word in arguments)
    return [*chain.from_iterable(parts)]


def _with_source(arguments: list[str]) -> list[str]:
    """The arguments with the class of ``--data.dataset FILE.csv``, where options of it follow."""
    words = list[str]()
    for word in arguments:  # no other option, which may have a value such as -1
        words += word.split("=", 1) if word.startswith("--data.dataset=") else [word]
    if "--data.dataset" not in words[:-1]:
        return arguments
    at = words.index("--data.dataset") + 1
    name = {".csv": ("Table", "csv_file"), ".npz": ("Arrays", "path")}.get(Path(words[at]).suffix)
    if name is None or not any(word.startswith("--data.dataset.") for word in words[at:]):
        return arguments
    return [*words[:at], name[0], f"--data.dataset.{name[1]}", *words[at:]]


def _config_of_run(arguments: list[str]) -> Path | None:
    """The configuration in the run folder of a checkpoint file, where the command names no
    configuration.
    """
    words = _words(arguments)
    if {"--config", "-c"} & {*words} or "--ckpt_path" not in words[:-1]:
        return None
    checkpoint = Path(words[words.index("--ckpt_path") + 1])
    saved = checkpoint.absolute().parent.with_name("config.yaml")
    return saved if checkpoint.is_file() and saved.is_file() else None


def _message(error: BaseException) -> str | None:
    """The message of an error of the machine, or of one that this package or Lightning raised; None
    for a bug.
    """
    if isinstance(error, ModuleNotFoundError) and (text := how_to_install(error.name)):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    fixable = isinstance(error, (ValueError, ModuleNotFoundError, OSError))
    fixable = fixable or type(error).__name__ == "MisconfigurationException"  # Lightning's
    module = ""
    for frame, _ in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    raised_here = module.partition(".")[0] in ("lightning_fedssl", "lightning")
    return str(error) if fixable and raised_here else None
