"""Configurations from Python: the trainer, method and data that ``fit`` makes of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.cli.messages import one_line
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.trainer import FederatedTrainer

Configuration = str | Path | Mapping[str, Any]
"""A file, the name of a configuration of the package, or a mapping of keys, nested or with dots."""


class Experiment(NamedTuple):
    """What a configuration describes.

    Attributes:
        trainer: The trainer, not started.
        model: The method.
        datamodule: The data and their partition.
    """

    trainer: FederatedTrainer
    model: FederatedAlgorithm
    datamodule: FederatedDataModule

    @classmethod
    def from_config(
        cls,
        *configurations: Configuration,
        datamodule_class: type[FederatedDataModule] = FederatedDataModule,
    ) -> Experiment:
        """Build the objects of a configuration, as ``fit`` does with ``--config`` and options.

        For example::

            values = {"trainer.max_rounds": 5}
            trainer, model, data = Experiment.from_config("semifl_digits.yaml", values)
            trainer.fit(model, data)

        Random numbers are seeded with ``seed_everything``, which is 0 where no configuration sets
        it.

        Args:
            configurations: Files and mappings of keys in order; later ones override earlier ones.
            datamodule_class: A data module of your own.

        Raises:
            ValueError: With the key or the file, if a configuration is wrong.
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
        command: The command in the names of environment variables:
            ``FEDSSL_COMPARE__TRAINER__MAX_ROUNDS``.

    Raises:
        ValueError: If a configuration or an option is wrong.
    """
    files = [f"--config={file}" for file in chain(*map(_files, configurations))]
    settings = {"exit_on_error": False, "env_prefix": f"FEDSSL_{command.upper()}_"}
    try:
        with quiet():
            return FederatedCLI([*files, *options], False, datamodule_class, settings)
    except argparse.ArgumentError as error:
        raise ValueError(one_line(str(error))) from error


def _files(configuration: Configuration) -> Iterator[str]:
    """A file as it is; a mapping in JSON, one key after another, since a key with dots may change
    an earlier one.
    """
    if isinstance(configuration, Mapping):
        for key, value in configuration.items():
            yield json.dumps({key: value}, default=_as_json)
    else:
        yield str(configuration)


def _as_json(value: Any) -> Any:
    """A value as JSON can hold it: paths as text, scalars of NumPy as numbers, classes by their
    import paths.
    """
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    raise ValueError(
        f"a configuration cannot hold an object of type {type(value).__name__}: give a number, a "
        "text, or a class by its import path, with its arguments as init_args"
    )
