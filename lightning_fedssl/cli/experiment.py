"""Configurations from Python: the trainer, the method and the data that ``fit`` would make of them."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import yaml

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli import messages, parser_messages
from lightning_fedssl.cli.config_files import find_config
from lightning_fedssl.cli.environment import with_environment
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.cli.lightning_parser import FederatedArgumentParser
from lightning_fedssl.cli.strict_yaml import is_below
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.trainer import FederatedTrainer

Configuration = str | Path | Mapping[str, Any]
"""A file, the name of a configuration of the package, or a mapping of keys, nested or with dots."""


class Experiment(NamedTuple):
    """What a configuration describes.

    Attributes:
        trainer: The trainer.
        model: The method.
        datamodule: The data and their partition.
    """

    trainer: FederatedTrainer
    model: FederatedAlgorithm
    datamodule: FederatedDataModule

    @classmethod
    def from_config(
        cls, *configurations: Configuration, datamodule_class: type[FederatedDataModule] = FederatedDataModule
    ) -> Experiment:
        """Build the objects of a configuration, as ``fit`` does with ``--config`` and options.

        For example::

            trainer, model, data = Experiment.from_config("semifl_digits.yaml", {"trainer.max_rounds": 5})
            trainer.fit(model, data)

        Random numbers are seeded with ``seed_everything``, which is 0 where no configuration sets it.

        Args:
            configurations: Files and mappings of keys in order; later ones override earlier ones.
            datamodule_class: A data module of your own.

        Raises:
            ValueError: In one line, with the key or the file, if a configuration is wrong.
        """
        cli = read_configurations(configurations, datamodule_class=datamodule_class)
        return cls(cli.trainer, cli.model, cli.datamodule)  # type: ignore[arg-type]


def read_configurations(
    configurations: Sequence[Configuration],
    options: Sequence[str] = (),
    datamodule_class: type[FederatedDataModule] = FederatedDataModule,
    command: str = "python",
) -> FederatedCLI:
    """Read configurations and build the objects that they describe, without running a command.

    Args:
        configurations: Files and mappings of keys in order; later ones override earlier ones.
        options: Options of the command line, applied last.
        datamodule_class: A data module of your own.
        command: The command in the names of environment variables: ``FEDSSL_COMPARE__TRAINER__MAX_ROUNDS``.

    Raises:
        ValueError: In one line if a configuration or an option is wrong.
    """
    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            files = [part for file in _files(configurations, Path(folder)) for part in ("--config", file)]
            _, *arguments = with_environment([command, *files, *options], os.environ)
            return FederatedCLI(
                arguments, run=False, datamodule_class=datamodule_class, exit_on_error=False,
                env_prefix=f"FEDSSL_{command.upper()}_",
            )  # fmt: skip
    except argparse.ArgumentError as error:
        known = FederatedCLI.keys_of(datamodule_class)
        raise ValueError(parser_messages.explain(str(error), known, FederatedArgumentParser.bases)) from error
    except Exception as error:
        message = messages.describe(error)
        if message is None:
            raise
        raise ValueError(message) from error


def _files(configurations: Sequence[Configuration], folder: Path) -> Iterator[str]:
    """The files of configurations; mappings are written into a folder."""
    for number, configuration in enumerate(configurations):
        if isinstance(configuration, Mapping):
            for part, keys in enumerate(_without_parents(configuration)):
                path = folder / f"{number}_{part}.yaml"
                path.write_text(yaml.safe_dump(_plain(keys), sort_keys=False), encoding="utf-8")
                yield str(path)
        else:
            yield _find(str(configuration))


def _plain(value: Any, key: str = "") -> Any:
    """A value as YAML can hold it: paths as text, scalars of NumPy as numbers, classes by their import paths.

    Args:
        value: The value; mappings and lists may contain others.
        key: The key that it belongs to, with its parents.

    Raises:
        ValueError: Naming the key, if a file could not hold the value.
    """
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, type) and "<" not in value.__qualname__:  # a class inside a function has no import path
        return f"{value.__module__}.{value.__qualname__}"
    try:
        yaml.safe_dump(value)
    except yaml.representer.RepresenterError as error:
        raise ValueError(
            f"{key}: a configuration cannot hold an object of type {type(value).__name__}: give a number, a text, or a "
            "class by its import path, with its arguments as init_args"
        ) from error
    return value


def _without_parents(mapping: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A mapping in parts, in order; no part has a key together with its parent, of which jsonargparse would drop one.

    ``{"model": "FixMatch", "model.threshold": 0.8}`` becomes two parts.
    """
    part: dict[str, Any] = {}
    for key, value in mapping.items():
        if any(is_below(key, other) or is_below(other, key) for other in part):
            yield part
            part = {}
        part[key] = value
    if part:
        yield part


def _find(name: str) -> str:
    try:
        return str(find_config(name))
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
