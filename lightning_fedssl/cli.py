"""The command line: Lightning's CLI, with a trainer of our own and messages that say what to change."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]
from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

import lightning_fedssl
from lightning_fedssl import algorithms, callbacks, errors, models
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.partition import Partition
from lightning_fedssl.schedules import Schedule
from lightning_fedssl.trainer import FederatedTrainer

COMMANDS = ("fit", "validate", "test", "predict")

_FROM_DATA = ("num_classes", "in_shape")
"""Arguments of an algorithm that the data set."""

_BASES: dict[str, type] = {
    "model": FederatedAlgorithm,
    "network": models.Network,
    "optimizer": Optimizer,
    "server_optimizer": Optimizer,
    "schedule": Schedule,
    "partition": Partition,
    "callbacks": Callback,
    "logger": Logger,
}
"""What may be named under which key; bare names work for the classes that are imported here."""

_NAMED = (algorithms, callbacks)  # imported so that their classes are known by bare name


class ConfigFile(ActionConfigFile):
    """``--config``: a file, or the name of a configuration that comes with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Merge the file into what was read so far; an error in it is told with the file's name."""
        parser.reading = str(values)
        super().__call__(parser, cfg, str(find_config(parser.reading)), option_string)  # type: ignore[no-untyped-call]
        parser.reading = ""


def find_config(name: str) -> Path:
    """The file that ``--config`` means: a path, else a configuration of that name in the package.

    Raises:
        TypeError: If there is neither; the message lists the package's own. (jsonargparse expects this type.)
    """
    folders = [Path(folder, "configs") for folder in lightning_fedssl.__path__]
    ours = {str(path.relative_to(folder)): path for folder in folders for path in folder.rglob("*.yaml")}
    path = Path(name)
    if not path.is_file():
        path = ours.get(name, path)
    if not path.is_file():
        raise TypeError(f"there is no such file; the package comes with {', '.join(sorted(ours))}")
    return path


class FederatedArgumentParser(LightningArgumentParser):
    """Lightning's parser that also takes a trainer of ours, and that explains what is wrong."""

    options: tuple[str, ...] = ()
    """The keys of a command, for suggestions."""
    reading = ""
    """The configuration file that is being read."""

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a class; Lightning's own method takes no trainer but Lightning's."""
        if lightning_class is not FederatedTrainer:
            return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        added: list[str] = self.add_class_arguments(
            FederatedTrainer, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
        )
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit with code 2."""
        if not self.exit_on_error or _wants_traceback():
            super().error(message, ex)
        place = f"{self.reading}: " if self.reading else ""
        sys.stderr.write(f"error: {place}{errors.explain(message, self.options, _BASES)}\n")
        self.exit(2)
        raise SystemExit(2)


class SaveConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run folder, if there is one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write ``config.yaml``; a run without loggers has no folder of its own."""
        if trainer.log_dir is not None:
            super().setup(trainer, pl_module, stage)


class FederatedCLI(LightningCLI):
    """``lightning-fedssl``: a command, and the trainer, algorithm and data that it needs, from files and options.

    Args:
        args: What follows the program's name; the process's own arguments if left out.
        run: Whether to run the command; False takes no command and leaves ``trainer``, ``model`` and ``datamodule``.
        datamodule_class: A data module of your own, derived from :class:`FederatedDataModule`; its arguments are the
            keys of ``data``.
    """

    def __init__(
        self,
        args: ArgsType = None,
        run: bool = True,
        datamodule_class: type[FederatedDataModule] = FederatedDataModule,
    ) -> None:
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
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands, and what their methods get from the CLI itself."""
        return {command: {"model", "datamodule"} for command in COMMANDS}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser for the program or one command. Abbreviations are off: a typo would set another key."""
        settings: dict[str, Any] = {
            "prog": "lightning-fedssl",
            "allow_abbrev": False,
            "default_env": True,
            "env_prefix": "FEDSSL",
            "dump_header": [f"lightning-fedssl {lightning_fedssl.__version__}"],
        }
        parser = FederatedArgumentParser(**{**settings, **kwargs})
        parser.add_argument(
            "-c", "--config", action=ConfigFile,
            help="A YAML file, or the name of one that comes with the package; of several, the later ones win.",
        )  # fmt: skip
        parser.options = self._options()
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="The seed of every random draw: partition, weights, cohorts, batches, augmentation. true draws one.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The data tell the algorithm what nobody should type twice."""
        for name in _FROM_DATA:
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    def after_instantiate_classes(self) -> None:
        """Refuse a typed value that the data contradict; the link would replace it without a word."""
        typed = self._get(self.config, "model").init_args
        for name in _FROM_DATA:
            given, actual = _plain(typed.get(name)), _plain(getattr(self.datamodule, name))
            if given not in (None, actual):
                raise ValueError(f"model.{name} is {given}, but the data have {actual}: leave it out, the data set it")

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone; Lightning would put a checkpoint's hyper-parameters over the command line."""

    def _options(self) -> tuple[str, ...]:
        groups = {"trainer": FederatedTrainer, "data": self._datamodule_class}
        keys = [f"{group}.{name}" for group, owner in groups.items() for name in inspect.signature(owner).parameters]
        return ("config", "seed_everything", "ckpt_path", "print_config", "trainer", "model", "data", *keys)


def main(args: ArgsType = None, datamodule_class: type[FederatedDataModule] = FederatedDataModule) -> int:
    """Run the command line.

    For a data module of your own, put two lines into a script and call it as you would call ``lightning-fedssl``::

        from lightning_fedssl.cli import main
        main(datamodule_class=MyData)

    Args:
        args: What follows the program's name; the process's own arguments if left out.
        datamodule_class: See :class:`FederatedCLI`.

    Returns:
        The exit code: 0, or 1 after an error that is told in one line. ``FEDSSL_TRACEBACK=1`` shows where it came from.

    Raises:
        SystemExit: With code 2 if the arguments are wrong, with 0 after ``--help`` or ``--print_config``.
    """
    _show_log()
    try:
        FederatedCLI(args=args, datamodule_class=datamodule_class)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = None if _wants_traceback() else errors.describe(error)
        if message is None:
            raise
        if _is_first_on_machine():
            sys.stderr.write(f"error: {message}\n")
        return 1
    return 0


def _is_first_on_machine() -> bool:
    """Whether this process speaks for those that were started with it: they read the same files and fail alike."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _show_log() -> None:
    """Print what the package logs, once for all ranks, unless the caller has set logging up."""
    log = logging.getLogger("lightning_fedssl")
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO if _is_first_on_machine() else logging.ERROR)


def _wants_traceback() -> bool:
    return os.environ.get("FEDSSL_TRACEBACK", "") not in ("", "0")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
