"""The parsers of all commands: configuration files by path or name, and messages that say what to change."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, Namespace  # type: ignore[attr-defined]

from lightning_fedssl.cli import parser_messages
from lightning_fedssl.cli.config_files import find_config, find_suite
from lightning_fedssl.cli.config_sources import GROUPS, content_of, file_of_key, group_files, with_options_last
from lightning_fedssl.cli.keys import COMMANDS, SCRIPTS, as_typed
from lightning_fedssl.cli.strict_yaml import check_yaml_file
from lightning_fedssl.data.augment.custom import BatchView
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.sources import DataSource

_log = logging.getLogger(__name__)

BASES: dict[str, type] = {"partition": Partition, "dataset": DataSource, "weak": BatchView, "strong": BatchView}
"""The base classes of the keys of ``data`` that name a class."""

_typed: ContextVar[Sequence[str]] = ContextVar("typed", default=())
"""The arguments of the outermost parser; jsonargparse parses those of a class with a parser of its own."""


class ConfigFile(ActionConfigFile):
    """``--config``: a file, or the name of a configuration that comes with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Merge the file into the configuration; the message of an error in it names the file."""
        parser.reading = str(values)
        path = find_config(parser.reading)
        check_yaml_file(path)
        before = _callbacks(cfg)
        super().__call__(parser, cfg, str(path), option_string)  # type: ignore[no-untyped-call]
        after = _callbacks(cfg)
        if dropped := [name for name in before if name not in after]:
            _log.warning(
                "trainer.callbacks of %s replaces that of the files before it, so that this run is without %s; write "
                "callbacks+: to add to the list", parser.reading, ", ".join(dropped),
            )  # fmt: skip
        parser.reading = ""


def _callbacks(cfg: Any) -> list[str]:
    """The names of the classes in ``trainer.callbacks``."""
    found = cfg.get("trainer.callbacks")
    named = [one.get("class_path") if hasattr(one, "get") else one for one in found] if isinstance(found, list) else []
    return [str(name).rpartition(".")[2] for name in named]


class SuiteFile(ActionConfigFile):
    """``compare``'s suite: a file, or the name of a suite that comes with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Read the file; later messages name it, too, because some errors are found after all files were read."""
        parser.reading = str(values)
        path = find_suite(parser.reading)
        check_yaml_file(path)
        content = content_of("suite", parser.reading)
        if isinstance(content, dict) and "groups" not in content and content.keys() & set(GROUPS):
            raise TypeError(f"this is a configuration of one run: lightning-fedssl fit --config {parser.reading}")
        if isinstance(content, dict):
            _check_suite(content)
        super().__call__(parser, cfg, str(path), option_string)  # type: ignore[no-untyped-call]


def _check_suite(content: Mapping[str, Any]) -> None:
    """Refuse entries and seeds of another form, which the parser would describe by the types that it tried.

    Args:
        content: The suite's file.

    Raises:
        TypeError: Naming the key.
    """
    seeds, groups = content.get("seeds"), content.get("groups")
    if "seeds" in content and not isinstance(seeds, list):
        raise TypeError(f"seeds: {seeds!r} is no list of whole numbers; give one such as [0, 1, 2]")
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict):
            raise TypeError(f"groups: {group!r} is no group; give {{title: TEXT, entries: [...]}}")
        entries = group.get("entries")
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict):
                raise TypeError(f"groups: entries: {entry!r} is no entry; give {{label: NAME, config: FILE}}")


class HelpFormatter(DefaultHelpFormatter):
    """Help with each key once: not in the usage line, and not as the name of its environment variable.

    Where a key takes more than 20 classes, the help names the public ones of this package and counts the others.
    """

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None) -> str:
        program = self._prog.replace(" [options]", "")
        if prefix == "":  # asked for as the program's name of a command
            return program
        return f"usage: {program} [--config FILE]... [--KEY VALUE]...\n\n"

    def _format_action_invocation(self, action: Any) -> str:
        invocation = str(super()._format_action_invocation(action))
        return invocation.removeprefix("ARG:   ").partition("\n  ENV:   ")[0]

    def _get_help_string(self, action: Any) -> str:
        return re.sub(r"(?<=, known subclasses: )[\w., ]+", _short_list, super()._get_help_string(action))


def _short_list(match: re.Match[str]) -> str:
    names = match[0].split(", ")
    shown = [name for name in names if re.fullmatch(r"lightning_fedssl\.\w+", name)]
    others = f"{len(names) - len(shown)} others"
    return match[0] if len(names) <= 20 else ", ".join([*shown, others])


class PlainArgumentParser(ArgumentParser):
    """jsonargparse's parser with plain error messages. It does not import Lightning, which takes seconds."""

    bases: ClassVar[Mapping[str, type]] = BASES
    """The base classes of the keys that name a class; bare names work for the classes that are imported here."""

    options: tuple[str, ...] = ()
    """The keys of a command, for suggestions."""
    reading = ""
    """The configuration file that is being read."""
    arguments: Sequence[str] = ()
    """The arguments that are being parsed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a parser; see jsonargparse. The help of a class, which jsonargparse asks a new parser for, is short."""
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse arguments, options after files; see jsonargparse. The files of one group of keys are checked first."""
        self.arguments = with_options_last(sys.argv[1:] if args is None else args)
        for path in group_files(self.arguments):
            try:
                check_yaml_file(path)
            except TypeError as error:
                self.reading = str(path)
                self.error(str(error), error)
        token = _typed.set(_typed.get() or self.arguments)
        try:
            return super().parse_args(self.arguments, *rest, **kwargs)
        finally:
            _typed.reset(token)

    def add_function_arguments(self, *args: Any, linked_targets: Any = None, **kwargs: Any) -> list[str]:
        """Add the arguments of a function; see jsonargparse, which passes on links of a class that functions refuse."""
        return super().add_function_arguments(*args, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help; see jsonargparse. Keys of a class have the parents that ``--PARENT.KEY.help`` has."""
        text = str(super().format_help(*args, **kwargs))
        asked = re.match(r"Help for --([\w.]+)\.help=", self.description or "")
        typed = [option.partition("=")[0] for option in _typed.get()]
        whole = next((o for o in typed if asked and o.endswith(f".{asked[1]}.help")), None)
        return text.replace(f"--{asked[1]}.", f"{whole.removesuffix('help')}") if asked and whole else text

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Serialize a configuration; see jsonargparse. It is not validated again: parsing did so."""
        return str(super().dump(*args, **{"skip_validation": True, **kwargs}))

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write a configuration; see jsonargparse. It is not validated again: parsing did so."""
        super().save(*args, **{"skip_validation": True, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line, which names the configuration file if the error is in one, and exit with code 2."""
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        text = parser_messages.explain(message, self.options, self.bases, self._program())
        arguments = ["--config", self.reading] if self.reading else self.arguments
        file = file_of_key(parser_messages.key_of(text), arguments) or self.reading
        typed = as_typed(text, self.arguments)
        file, text = ("", typed) if typed != text else (file, text)
        sys.stderr.write(f"error: {file}: {text}\n" if file else f"error: {text}\n")
        self.exit(2)
        raise SystemExit(2)

    def _program(self) -> str:
        """The command whose help lists the keys."""
        command = self.prog.rpartition(" ")[2]
        return f"lightning-fedssl {command if command in (*COMMANDS, *SCRIPTS) else 'fit'}"


def refuse_json(options: Namespace, instead: str) -> None:
    """Refuse ``--json true`` where a command has no result; the configuration in a run folder has ``json: false``.

    Args:
        options: The parsed arguments.
        instead: What to do instead.

    Raises:
        ValueError: If it is given.
    """
    if options.json:
        raise ValueError(f"--json is for commands that train or evaluate: {instead}")


class ScriptParser(argparse.ArgumentParser):
    """The parser of a command without keys: its errors are one line, as those of the other commands."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def wants_traceback() -> bool:
    """Whether ``FEDSSL_TRACEBACK`` asks for tracebacks instead of messages."""
    return os.environ.get("FEDSSL_TRACEBACK", "") not in ("", "0")
