"""The command line of ``compare``: its options, and how it reads a suite's configurations."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from jsonargparse import Namespace

from lightning_fedssl.cli.config_files import find_suite
from lightning_fedssl.cli.parser import ConfigFile, Parser
from lightning_fedssl.comparison.command import compare
from lightning_fedssl.comparison.plan import Resolved, plan, slug
from lightning_fedssl.comparison.recorded import read_folder
from lightning_fedssl.comparison.suite import Suite, SuiteEntry

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item")

DESCRIPTION = """\
Runs every configuration of a suite with every seed, on identical partitions and initial weights. Writes results.csv (a
row a run), curves.csv, pseudo_labels.csv, results.md (a table for each group) and plots. SUITE is a file, or the name
of a suite that comes with the package: digits.yaml, mnist.yaml, fashionmnist.yaml, cifar10_500.yaml; with the settings
of the papers, for GPUs: cifar10_4000.yaml, svhn_1000.yaml, fedrgd_tables.yaml, fedrgd_sweeps.yaml, semisfl_sweeps.yaml,
semisfl_image100.yaml.

A run that has finished is not repeated; one that was stopped or killed resumes from its last checkpoint. A run is known
by its resolved configuration, seed, partition, initial weights, code and versions of torch, torchvision and NumPy: when
one of them changes it is trained anew, in a folder of its own.

Options of trainer, model and data, as fit takes them, win over the suite in every run:

  lightning-fedssl compare digits.yaml --seeds [0] --trainer.max_rounds 2 --output /tmp/quick

A shortened run is a trial and no comparison: configurations may plan different numbers of rounds and steps.

A long suite can be trained in parts, also on several machines. Each part needs a folder of its own; the last command
trains nothing, and writes the tables and plots of all parts:

  lightning-fedssl compare digits.yaml --seeds [0] --output part_0
  lightning-fedssl compare digits.yaml --seeds [1] --only [SemiFL,FedRGD] --output part_1
  lightning-fedssl compare digits.yaml --recorded [part_0,part_1] --only [] --output all
"""

EXAMPLE = """\
a suite:

  title: Two methods on the digits
  seeds: [0, 1, 2]
  target: 0.9                      # to accuracy 90 %: rounds, bytes and simulated seconds
  overrides: {trainer.accelerator: cpu}
  groups:
    - title: Labels at the server
      overrides: {data.partition: Shards}
      entries:
        - {label: SemiFL, config: semifl_digits.yaml}
        - {label: SemiFL without mixing, config: semifl_digits.yaml, overrides: {model.init_args.mix_weight: 0}}
        - {label: 50 labels alone, config: supervised_digits.yaml, role: bound}
"""


class _SuiteFile(ConfigFile):
    """The suite: a file, or the name of a suite that comes with the package."""

    def find(self, name: str) -> Path:
        """The suite of a path or name."""
        return find_suite(name)


def main(arguments: Sequence[str], datamodule_class: type[FederatedDataModule] | None = None) -> int:
    """Run ``compare``.

    Args:
        arguments: What follows the command's name.
        datamodule_class: A data module of your own.

    Returns:
        The exit code; see :func:`lightning_fedssl.comparison.command.compare`.

    Raises:
        ValueError: If the suite cannot be run.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    own, passed_on = split_options(arguments)
    options = parser().parse_args(own)
    if not options.suite:
        raise ValueError(
            "no suite is given: lightning-fedssl compare digits.yaml, or a file of your own; lightning-fedssl suites "
            "lists those of the package"
        )
    if options.jobs < 1:
        raise ValueError(f"--jobs is {options.jobs}: give 1 or more")
    recorded = [run for part in options.recorded for run in read_folder(Path(part))]
    name = str(options.suite[-1])
    folder = Path(options.output or f"runs/compare/{slug(Path(name).stem)}")
    try:
        suite = _suite(options)
        _check_labels(options.only, suite)
        reader = partial(resolve, options=passed_on, datamodule_class=datamodule_class)
        runs = plan(suite, reader, folder / "runs", options.any_code, with_bar)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    command_line = shlex.join(["lightning-fedssl", "compare", *arguments])
    return compare(
        suite, runs, folder, options.jobs, program(datamodule_class), command_line, options.only, recorded
    )  # fmt: skip


def with_bar(items: Sequence[_Item], title: str) -> Iterable[_Item]:
    """The items, with a progress bar on a terminal that vanishes after the last one."""
    from rich.console import Console
    from rich.progress import track

    console = Console()
    return track(items, title, console=console, transient=True, disable=not console.is_terminal)


def _check_labels(only: Sequence[str] | None, suite: Suite) -> None:
    labels = [entry.label for entry in suite.entries]
    for label in only or []:
        if label not in labels:
            close = difflib.get_close_matches(label, labels, 1)
            meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(labels)}"
            raise ValueError(f"--only: the suite has no entry {label!r}; {meant}")


def parser() -> Parser:
    """The parser of the options of ``compare`` itself: the keys of a suite, and how to run it."""
    made = Parser(
        prog="lightning-fedssl compare", description=DESCRIPTION, epilog=EXAMPLE, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, default_env=True, env_prefix="FEDSSL_COMPARE_",
    )  # fmt: skip
    made.add_argument("--suite", action=_SuiteFile, help="The suite: a file or a name; --suite may be left out.")
    made.add_argument("--jobs", type=int, default=1, help="Runs trained at once, one thread each.")
    made.add_argument(
        "--any_code", type=bool, default=False,
        help="Reuse finished runs even if other code trained them; results.csv has a hash of the code of each run.",
    )  # fmt: skip
    made.add_argument("--output", type=str | None, default=None, help="Output folder; default runs/compare/<suite>.")
    made.add_argument(
        "--only", type=list[str] | None, default=None,
        help="Train only entries of these labels; the tables have the others as far as they have finished. [] trains "
        "nothing. Default: all.",
    )  # fmt: skip
    made.add_argument(
        "--recorded", type=list[str], default=[],
        help="Folders of other comparisons. Runs that have finished there are taken from their CSV files, and are not "
        "trained again.",
    )  # fmt: skip
    made.add_class_arguments(Suite, None, fail_untyped=False, instantiate=False)
    return made


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of ``compare``, including the suite, and the options of trainer, model and data."""
    own: list[str] = []
    passed_on: list[str] = []
    target, needs_value = own, False
    for argument in arguments:
        if re.match(r"--?[a-z]", argument):
            target = passed_on if argument.split(".")[0].split("=")[0] in ("--trainer", "--model", "--data") else own
            needs_value = "=" not in argument
        elif needs_value:
            needs_value = False
        else:
            own.append("--suite")
            target = own
        target.append(argument)
    return own, passed_on


def _suite(options: Namespace) -> Suite:
    """The suite as an object."""
    made = parser().instantiate_classes(options)
    return Suite(made.title, made.groups, made.seeds, made.target, made.overrides, made.note)


def resolve(
    entry: SuiteEntry,
    overrides: Sequence[dict[str, Any]],
    options: Sequence[str] = (),
    datamodule_class: type[FederatedDataModule] | None = None,
) -> Resolved:
    """Read an entry's configurations.

    Args:
        entry: The entry.
        overrides: Overrides of their keys, applied in order.
        options: Options of the command line, applied last.
        datamodule_class: A data module of your own.

    Raises:
        ValueError: In one line, with the entry's label, if they are wrong.
    """
    from lightning_fedssl.cli.experiment import read_configurations
    from lightning_fedssl.cli.lightning_cli import limited
    from lightning_fedssl.data.datamodule import FederatedDataModule

    try:
        with limited("lightning.pytorch.utilities.rank_zero", logging.WARNING):  # each run's log has its precision
            cli = read_configurations(
                [*entry.files, *overrides], options, datamodule_class or FederatedDataModule, command="compare"
            )
    except ValueError as error:
        raise ValueError(f"{entry.label}: {error}") from error
    text = cli.parser.dump(cli.config, skip_none=False)
    config = yaml.safe_load(text)
    for key, needed in (("logger", True), ("fast_dev_run", False)):
        if (value := config["trainer"].get(key)) not in (None, needed):
            raise ValueError(
                f"{entry.label}: trainer.{key} is {value}: the tables are made from the metrics.csv of whole runs, "
                "which the default loggers write; leave the key out"
            )
    return Resolved(text, config, cli.model, cli.datamodule)


def program(datamodule_class: type[FederatedDataModule] | None) -> list[str]:
    """The program that trains a run: this package, or the user's script with its own data module."""
    if datamodule_class is None:
        return [sys.executable, "-m", "lightning_fedssl"]
    return [sys.executable, os.path.abspath(sys.argv[0])]
