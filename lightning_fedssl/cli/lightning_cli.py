"""Lightning's CLI with :class:`FederatedTrainer`."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

import lightning_fedssl
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks.run_result import as_json, summarize_run
from lightning_fedssl.cli.environment import without_method
from lightning_fedssl.cli.keys import COMMANDS
from lightning_fedssl.cli.lightning_parser import FederatedArgumentParser
from lightning_fedssl.cli.parser import ConfigFile, HelpFormatter
from lightning_fedssl.cli.seed import draw_seed
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.trainer import FederatedTrainer

_ENVIRONMENT = (
    "Each key can also come from the environment: FEDSSL_FIT__TRAINER__MAX_ROUNDS is --trainer.max_rounds of fit. "
    "Files have precedence over the environment, and the command line over both."
)

_EVALUATIONS = ("validate", "test", "predict")
"""Commands that use a model as it is."""

_FROM_DATA = ("num_classes", "in_shape")
"""Arguments of an algorithm whose values come from the data."""


class SaveConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run folder, if there is one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write ``config.yaml``; a run without loggers has no folder of its own.

        After ``fit`` the file describes the whole run: a resumed run equals one without interruption, so the file names
        no checkpoint (``result.json`` does). After other commands it has the path of the checkpoint that they used. It
        does not say how the result is printed.
        """
        if trainer.log_dir is not None:
            used = None if stage == "fit" else trainer.ckpt_path
            self.config = self.config.clone()
            self.config["json"], self.config["ckpt_path"] = False, used and str(used)
            super().setup(trainer, pl_module, stage)


class FederatedCLI(LightningCLI):
    """``lightning-fedssl``: a command, and the trainer, algorithm and data that it needs, from files and options.

    Args:
        args: The arguments after the program's name; those of the process if left out.
        run: Whether to run the command; False takes no command and leaves ``trainer``, ``model`` and ``datamodule``.
        datamodule_class: A data module of your own, derived from :class:`FederatedDataModule`; its arguments are the
            keys of ``data``.
        exit_on_error: Print what is wrong with the arguments and exit; False raises :class:`argparse.ArgumentError`.
        env_prefix: What the names of environment variables begin with.
    """

    def __init__(
        self,
        args: ArgsType = None,
        run: bool = True,
        datamodule_class: type[FederatedDataModule] = FederatedDataModule,
        exit_on_error: bool = True,
        env_prefix: str = "FEDSSL",
    ) -> None:
        typed = sys.argv[1:] if args is None else args
        first = typed[0] if isinstance(typed, list) and typed else None
        self._used = (first,) if first in COMMANDS else COMMANDS
        self._runs_a_command = run
        super().__init__(
            model_class=FederatedAlgorithm,
            datamodule_class=datamodule_class,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=FederatedArgumentParser,
            subclass_mode_model=True,
            subclass_mode_data=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"env_prefix": env_prefix} | ({} if exit_on_error else {"exit_on_error": False}),
            args=args,
            run=run,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The commands, and the arguments of their methods that the CLI passes itself; Lightning's is a static method.

        A parser takes a tenth of a second to build, so a call that begins with a command builds only the parser of it.
        """
        return {command: {"model", "datamodule"} for command in self._used}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser for the program or one command. Abbreviations are off, because a typo could set another key."""
        settings: dict[str, Any] = {
            "prog": "lightning-fedssl",
            "allow_abbrev": False,
            "default_env": True,
            "env_prefix": "FEDSSL",
            "formatter_class": HelpFormatter,
            "epilog": _ENVIRONMENT,
            "dump_header": [f"lightning-fedssl {lightning_fedssl.__version__}"],
        }
        parser = FederatedArgumentParser(**{**settings, **kwargs})
        parser.add_argument(
            "-c", "--config", action=ConfigFile,
            help="A YAML file, or the name of one that comes with the package. Later files override earlier ones.",
        )  # fmt: skip
        parser.options = self.keys_of(self._datamodule_class)
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="The seed of every random draw: partition, weights, cohorts, batches, augmentation. true draws one.",
        )
        parser.add_argument(
            "--json", type=bool, default=False,
            help="Print only the result, as one line of JSON. The run folder's result.json always has it.",
        )  # fmt: skip
        if not self._runs_a_command:
            _add_unread_checkpoint(parser)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if "ckpt_path" not in self._subcommand_method_arguments[subcommand]:
            _add_unread_checkpoint(parser)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link arguments of the algorithm to the data, so that they need not be given twice."""
        for name in _FROM_DATA:
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; a variable that names the method is among them."""
        with without_method():
            super().parse_arguments(parser, args)

    def _set_seed(self) -> None:
        """Seed all generators; ``true`` draws the seed, which is then part of the configuration that is saved."""
        if self._get(self.config, "seed_everything") is True:
            config = self.config[str(self.subcommand)] if self._runs_a_command else self.config
            config["seed_everything"] = draw_seed(os.environ)
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Refuse a checkpoint where no command resumes from it, and an evaluation of untrained weights.

        Raises:
            ValueError: If ``ckpt_path`` is given in vain, or missing.
        """
        arguments = self._subcommand_method_arguments[str(self.subcommand)] if self._runs_a_command else []
        path = self._get(self.config, "ckpt_path")
        if "ckpt_path" in arguments and path is None:
            self._refuse_untrained_weights()
        if "ckpt_path" not in arguments and path is not None:
            if self._runs_a_command:
                raise ValueError(f"{self.subcommand} reads no checkpoint: leave out --ckpt_path {path}")
            raise ValueError(
                f"ckpt_path is {path}, but no checkpoint is read here: set ckpt_path to null; in Python, pass it to "
                "trainer.fit, validate, test or predict"
            )
        if not self._runs_a_command:
            self.config.pop("ckpt_path")  # so that compare and deploy do not write the key

    def _refuse_untrained_weights(self) -> None:
        """Refuse to evaluate without a checkpoint, unless the weights come from a file."""
        given = self._get(self.config, "model").get("init_args") or {}
        if self.subcommand in _EVALUATIONS and given.get("init_from") is None:
            raise ValueError(
                f"{self.subcommand}: no checkpoint given: add --ckpt_path best (or last, or a file); without one the "
                "weights are untrained (model.init_from takes weights from elsewhere)"
            )

    def after_instantiate_classes(self) -> None:
        """Refuse a given value that contradicts the data; the link would replace it silently."""
        typed = self._get(self.config, "model").init_args
        for name in _FROM_DATA:
            given, actual = _plain(typed.get(name)), _plain(getattr(self.datamodule, name))
            if given not in (None, actual):
                raise ValueError(f"model.{name} is {given}, but the data have {actual}: leave it out, the data set it")

    def before_fit(self) -> None:
        """Turn off the progress bar with ``--json true``."""
        if self._get(self.config, "json"):
            vars(self.trainer)["enable_progress_bar"] = False

    def after_fit(self) -> None:
        """Print the result as JSON with ``--json true``."""
        if self._get(self.config, "json") and self.trainer.is_global_zero:
            sys.stdout.write(as_json(summarize_run(self.trainer, self.model)) + "\n")

    def after_predict(self) -> None:
        """Print the path of the predictions as JSON with ``--json true``."""
        if self._get(self.config, "json") and self.trainer.is_global_zero:
            found = {"predictions": vars(self.trainer)["status"].predictions_file}
            sys.stdout.write(as_json(summarize_run(self.trainer, self.model) | found) + "\n")

    before_validate = before_test = before_predict = before_fit
    after_validate = after_test = after_fit

    def _parse_ckpt_path(self) -> None:
        """Do nothing; Lightning would override the command line with the checkpoint's hyper-parameters."""

    @staticmethod
    def keys_of(datamodule_class: Callable[..., Any]) -> tuple[str, ...]:
        """The keys of a command, for suggestions."""
        groups: dict[str, Callable[..., Any]] = {"trainer": FederatedTrainer, "data": datamodule_class}
        keys = [f"{group}.{name}" for group, owner in groups.items() for name in inspect.signature(owner).parameters]
        own = ("config", "seed_everything", "json", "ckpt_path", "print_config")
        return (*own, "trainer", "model", "data", *keys)


def _add_unread_checkpoint(parser: LightningArgumentParser) -> None:
    """Accept the key ``ckpt_path``, which every configuration in a run folder has, where no checkpoint is read."""
    parser.add_argument("--ckpt_path", type=str | None, default=None, help=argparse.SUPPRESS)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's warning about arguments from Python, and its message about the seed."""
    with limited("lightning.fabric.utilities.seed", logging.ERROR), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python")
        yield


@contextmanager
def limited(logger: str, level: int) -> Iterator[None]:
    """Suppress the messages of a logger that are below a level."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
