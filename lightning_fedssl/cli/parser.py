"""The parser of all commands: jsonargparse's, with configurations by name and errors in one line
without the usage.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import pydoc
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch
import torch
import yaml
from jsonargparse import ActionConfigFile, get_loader, set_loader  # type: ignore[attr-defined]
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fedssl.cli.config_files import CONFIGS, find_config
from lightning_fedssl.cli.messages import one_line
from lightning_fedssl.cli.public import PARTS
from lightning_fedssl.comparison.plan import flat
from lightning_fedssl.storage.optional import how_to_install
from lightning_fedssl.storage.other_names import OTHER_NAMES
from lightning_fedssl.trainer import FederatedTrainer

_log = logging.getLogger(__name__)

_UNKNOWN = re.compile(r"(arguments: --|[Oo]ption '|path string: |choice: ')([\w.-]+)")
"""Where jsonargparse's sentences name an option, a class or a command that does not exist."""

_NOT_NAMED = (
    "help", "print_config", "print_shtab", "suite", "num_classes", "in_shape", "in_channels",
)  # fmt: skip
"""Options of the program, and those that the data set."""

_NEGATED = ("non", "uns", "anti", "decentral")
"""Begins a name that means the contrary of another one."""

_UNNAMED = re.compile(r"nrecognized arguments: ([\w./-]+\.ya?ml)$")
"""A configuration without ``--config``."""

_PLACES = (*PARTS, torch.optim, lightning.pytorch.callbacks, lightning.pytorch.loggers)
"""Where classes are that may be named."""

_PATH = "give a path such as package.module.Class"

_load_yaml = get_loader("yaml")

# The default of an argument of Lightning's callback Timer; jsonargparse writes configurations with
# this dumper.
yaml.SafeDumper.add_representer(
    Interval, lambda dumper, interval: dumper.represent_str(interval.value)
)


def load_yaml(text: str) -> Any:
    """Read YAML as jsonargparse does, and refuse a key that is given twice: YAML would take the
    last one silently.

    Args:
        text: The YAML.

    Raises:
        yaml.YAMLError: If it is not valid, or has a key twice.
    """
    for keys in _keys_of_mappings(yaml.compose(text, Loader=yaml.SafeLoader)):
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key} is given more than once: merge the entries")
    return _load_yaml(text)


def _keys_of_mappings(node: yaml.Node | None) -> Iterator[list[str]]:
    if isinstance(node, yaml.MappingNode):
        yield [str(key.value) for key, _ in node.value]
        for _, value in node.value:
            yield from _keys_of_mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _keys_of_mappings(value)


set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))


class ConfigFile(ActionConfigFile):
    """``--config``: a file, the name of a configuration that comes with the package, or a mapping
    in JSON.
    """

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Merge the file into the configuration; the message of an error in it names the file."""
        is_mapping = str(values).startswith("{")
        parser.reading = "" if is_mapping else f"{values}: "
        path = values if is_mapping else str(find_config(str(values)))
        super().__call__(parser, cfg, path, option_string)  # type: ignore[no-untyped-call]
        parser.validate(cfg, skip_required=True)
        parser.reading = ""
        if is_mapping:
            return
        written = dict(flat("", load_yaml(Path(path).read_text(encoding="utf-8"))))
        keys = {name.removesuffix(".class_path"): value for name, value in written.items()}
        if not Path(path).is_relative_to(CONFIGS):
            parser.own = {**parser.own, **keys}
        elif lost := [f"{k}: {v}" for k, v in parser.own.items() if keys.get(k, v) != v]:
            _log.warning(
                "%s replaces what a file of your own says before it, %s: give your own file last",
                values,
                ", ".join(lost),
            )


class Parser(LightningArgumentParser):
    """Lightning's parser for :class:`FederatedTrainer`, with short error messages."""

    reading = ""
    """The configuration file that is being read."""

    own: Mapping[str, Any] = {}
    """The keys of the user's own configuration files."""

    @classmethod
    def of_command(cls, name: str, description: str) -> Parser:
        """The parser of a command without a trainer.

        Variables such as ``FEDSSL_NEW__FOLDER`` set its options, too.

        Args:
            name: The command.
            description: What its help says, with its line breaks.
        """
        return cls(
            prog=f"lightning-fedssl {name}",
            description=description,
            allow_abbrev=False,
            default_env=True,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            env_prefix=f"FEDSSL_{name.upper()}_",
        )

    def add_lightning_class_args(
        self,
        lightning_class: Any,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a class; Lightning's own method only accepts Lightning's trainer."""
        if lightning_class is not FederatedTrainer:
            return super().add_lightning_class_args(
                lightning_class, nested_key, subclass_mode, required
            )
        added: list[str] = self.add_class_arguments(
            FederatedTrainer, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
        )
        return added

    def add_function_arguments(
        self, *args: Any, linked_targets: Any = None, **kwargs: Any
    ) -> list[str]:
        """Add the arguments of a function as jsonargparse does, without the links, which its
        functions refuse.
        """
        added = super().add_function_arguments(*args, **kwargs)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print in one line what is wrong, with the closest name, and exit with code 2."""
        message = message.replace("Unexpected config:", "expected keys and values, not:")
        file = "" if self.reading in message else self.reading
        text = f"{file}{message}{self._suggestion(message)}"
        if not self.exit_on_error:  # of a class that another parser reads, or in Python
            super().error(text, ex)
        sys.stderr.write(f"error: {one_line(text)}\n")
        raise SystemExit(2)

    def _suggestion(self, message: str) -> str:
        if message.endswith(".model"):
            return "; give --config FILE, or as --ckpt_path the file of a checkpoint"
        if "is abstract" in message:
            return f"; name a class before its options: {_accepted(message)}"
        if file := _UNNAMED.search(message):
            return f"; give a configuration as --config {file[1]}"
        missing = re.search(r"No module named '(\w+)", message)
        if missing and (text := how_to_install(missing[1])) not in message:
            return f"; {text}"
        unknown = _UNKNOWN.search(message)
        if unknown is None or "; " in message:  # where a class's own parser has suggested
            return ""
        kind, name = unknown[1], unknown[2].rpartition(".")[2]
        known = {option.rpartition(".")[2]: option for option in _options(self)}
        if "defaults" in known:  # of torch's Optimizer
            return "; name a class before its options"
        wanted = name.replace("-", "").lower()
        if other := OTHER_NAMES.get(name) or OTHER_NAMES.get(wanted):
            return f"; {other}"
        is_class, strict = kind.startswith("path"), "NestedArg" in message
        if is_class:
            known = {key.lower(): key for place in _PLACES for key in place.__all__ if key != name}
        close = difflib.get_close_matches(wanted, known, 1, 0.65 + 0.1 * strict)
        if close and not wanted.startswith(_NEGATED):
            return f"; did you mean {known[close[0]]}?"
        if strict and "class_path" not in message:
            return "; name a class before its options"
        if is_class:
            return f"; {_accepted(message)}"
        part = unknown[2].rpartition(".")[0]
        own = [k for k, v in known.items() if v.rpartition(".")[0] == part and k not in _NOT_NAMED]
        own = [k for k in own if not k.endswith("+")]  # the same, to add to a list
        return f"; its options are {', '.join(own)}" if own else ""


def _accepted(message: str) -> str:
    """Which classes of the package have one of the types that a message names."""
    types = {pydoc.locate(path) for path in re.findall(r"lightning[\w.]+\.[A-Z]\w+", message)}
    known = [getattr(place, name) for place in PARTS for name in place.__all__]
    names = [
        cls.__name__
        for cls in known
        if types.intersection(getattr(cls, "__mro__", ())[1:]) and not inspect.isabstract(cls)
    ]
    return f"choose one of {', '.join(names)}, or give a path" if names else _PATH


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The names of a parser's options and commands, and those of the options of its commands."""
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                yield option[2:]
        for name, inner in action.choices.items() if isinstance(action.choices, dict) else ():
            yield name
            yield from _options(inner)
