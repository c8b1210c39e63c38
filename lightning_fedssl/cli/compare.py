"""The command line of ``compare``: its options, and how it reads a suite's configurations."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_fedssl.cli.config_files import CONFIGS, find_config
from lightning_fedssl.cli.entry import main as main_of_process
from lightning_fedssl.cli.experiment import read_configurations
from lightning_fedssl.cli.messages import one_line
from lightning_fedssl.cli.parser import ConfigFile, Parser, load_yaml
from lightning_fedssl.comparison.command import compare
from lightning_fedssl.comparison.execute import Command
from lightning_fedssl.comparison.plan import Resolved, plan, slug
from lightning_fedssl.comparison.suite import TAKEN, Keys, Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.sources import reading
from lightning_fedssl.trainer.setup import refuse_pair

DESCRIPTION = """\
Runs every configuration of a suite with every seed, on identical partitions and initial weights;
writes CSV files, tables and a page. SUITE is a file, or the name of a suite of the package. A run
that has finished is not repeated, until its configuration, seed, partition, initial weights or the
version of this package (in a checkout its commit) change. Options of trainer, model and data, as
fit takes them, and --config with such options in a file win over the suite in every run:

  lightning-fedssl compare digits.yaml --seeds [0] --trainer.max_rounds 2 --output /tmp/quick
"""


def main(
    arguments: Sequence[str], datamodule_class: type[FederatedDataModule] = FederatedDataModule
) -> int:
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
    if not own or (own[0].startswith("-") and own[0] not in ("-h", "--help")):
        raise ValueError(
            "no suite is given: lightning-fedssl compare digits.yaml, or a file of your own, "
            "comes first"
        )
    name = own[0]
    log = logging.getLogger(reading.__name__)
    is_new = new_messages()
    try:
        suite, options = read_suite(own)
        if unknown := set(options.only or ()) - {entry.label for entry in suite.entries}:
            raise ValueError(f"--only: the suite has no entry {min(unknown)!r}")
        if any(option.startswith("--trainer.default_root_dir") for option in passed_on):
            raise ValueError(
                f"--trainer.default_root_dir: give {TAKEN['trainer.default_root_dir']}"
            )
        folder = Path(options.output or f"runs/compare/{slug(Path(name).stem)}")
        reader = partial(resolve, options=passed_on, datamodule_class=datamodule_class)
        print(f"reading the configurations of {len(suite.entries)} entries", flush=True)
        log.addFilter(is_new)
        runs = plan(suite, reader, folder / "runs")
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(one_line(f"{name}: {error}")) from error
    finally:
        log.removeFilter(is_new)
    command_line = shlex.join(["lightning-fedssl", "compare", *arguments])
    command: Command = main_of_process
    if datamodule_class is not FederatedDataModule:
        command = [sys.executable, os.path.abspath(sys.argv[0])]
    elif sys.platform != "linux":
        command = [sys.executable, "-m", "lightning_fedssl"]
    jobs = max(1, options.jobs)
    return compare(suite, runs, folder, jobs, command, command_line, options.only)


def new_messages() -> Callable[[logging.LogRecord], bool]:
    """A filter that drops what it has seen: every entry reads the same files."""
    first: dict[str, logging.LogRecord] = {}

    def is_new(record: logging.LogRecord) -> bool:
        return first.setdefault(record.getMessage(), record) is record

    return is_new


def parser() -> Parser:
    """The parser of the options of ``compare`` itself: the keys of a suite, and how to run it."""
    made = Parser.of_command("compare", DESCRIPTION)
    made.usage = "lightning-fedssl compare SUITE [--jobs N] [--KEY VALUE]..."
    made.add_argument("--suite", action=ConfigFile, help=argparse.SUPPRESS)
    made.add_argument("--jobs", type=int, default=1, help="Runs trained at once, one thread each.")
    made.add_argument(
        "--output", type=str | None, help="Output folder; default runs/compare/<suite>."
    )
    made.add_argument(
        "--only",
        type=list[str] | None,
        help="Train only entries of these labels; [] trains nothing.",
    )
    made.add_class_arguments(Suite, None, fail_untyped=False)
    return made


def read_suite(arguments: Sequence[str]) -> tuple[Suite, Any]:
    """A suite, and the options of the command.

    Args:
        arguments: The suite's file or name, then options; they win over the suite.
    """
    first, *others = arguments
    if first in ("-h", "--help"):
        parser().parse_args([first])
    if any(option.startswith(("--overrides", "--groups")) for option in others):
        raise ValueError(
            "overrides and groups are keys of the suite's file; give options of every run as "
            "--trainer, --model or --data"
        )
    file = find_config(first, CONFIGS / "suites")
    written = load_yaml(file.read_text(encoding="utf-8"))
    if isinstance(written, dict) and written.keys() & {"trainer", "model", "data"}:
        raise ValueError(f"it is not a suite: give it to lightning-fedssl fit --config {first}")
    options = parser().parse_args(["--suite", str(file), *others])
    groups = list(map(_group, options.groups, written["groups"]))
    values = {key: options[key] for key in ("title", "seeds", "target", "note")}
    return Suite(groups=groups, **values, **_overrides(written)), options


def _group(parsed: Any, written: Keys) -> SuiteGroup:
    entries = []
    for entry, text in zip(parsed.entries, written["entries"], strict=True):
        entries.append(SuiteEntry(**vars(entry) | _overrides(text)))
    return SuiteGroup(parsed.title, entries, note=parsed.note, **_overrides(written))


def _overrides(written: Keys) -> Keys:
    """The overrides as they are written; jsonargparse has filled in arguments of their classes."""
    return {"overrides": written.get("overrides") or {}}


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The suite and the options of ``compare``, and the options of trainer, model and data.

    Args:
        arguments: The command line; an option goes with the values that follow it.
    """
    own: list[str] = []
    passed_on: list[str] = []
    target = own
    for argument in arguments:
        if argument.startswith("--"):
            target = (
                passed_on
                if argument.startswith(("--trainer", "--model", "--data", "--config"))
                else own
            )
        target.append(argument)
    return own, passed_on


def resolve(
    entry: SuiteEntry,
    overrides: Sequence[Keys],
    options: Sequence[str] = (),
    datamodule_class: type[FederatedDataModule] = FederatedDataModule,
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
    try:
        cli = read_configurations([*entry.files, *overrides], options, datamodule_class, "compare")
    except ValueError as error:
        raise ValueError(f"{entry.label}: {error}") from error
    text = cli.parser.dump(cli.config, skip_none=False)
    config = yaml.safe_load(text)
    for key, needed in (("logger", True), ("fast_dev_run", False)):
        if config["trainer"].get(key) not in (None, needed):
            raise ValueError(
                f"{entry.label}: trainer.{key}: the tables need the metrics.csv of whole runs; "
                "leave it out"
            )
    clients = config["trainer"]["clients_per_round"] or 1
    refuse = partial(refuse_pair, cli.model, clients_per_round=clients)
    return Resolved(text, config, cli.model, cli.datamodule, refuse)
