"""Lightning's CLI with :class:`FederatedTrainer`."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli import (
    commands,
    public,  # noqa: F401  a name is found once its class is imported
)
from lightning_fedssl.cli.parser import ConfigFile, Parser
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.distributed.cpu_ranks import may_use_all_cores
from lightning_fedssl.interop import run_logger
from lightning_fedssl.task import Task
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.version import __version__


class SaveConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run folder, if there is one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write ``config.yaml``; it names no checkpoint, since a resumed run equals one without
        interruption.
        """
        if trainer.log_dir is not None:
            self.config = self.config.clone()
            self.config.pop("ckpt_path", None)
            super().setup(trainer, pl_module, stage)


class FederatedCLI(LightningCLI):
    """``lightning-fedssl``: a command, and the trainer, algorithm and data that it needs, from
    files and options.

    Args:
        args: The arguments after the program's name; those of the process if left out.
        run: Whether to run the command; False takes no command and leaves ``trainer``, ``model``
            and ``datamodule``.
        datamodule_class: A data module of your own, derived from :class:`FederatedDataModule`; its
            arguments are the keys of ``data``.
        parser_kwargs: Arguments of the parser, such as ``exit_on_error``.
    """

    def __init__(
        self,
        args: ArgsType = None,
        run: bool = True,
        datamodule_class: type[FederatedDataModule] = FederatedDataModule,
        parser_kwargs: dict[str, Any] | None = None,
    ) -> None:
        # Lightning advises against arguments that are not those of the process.
        warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python")
        super().__init__(
            model_class=FederatedAlgorithm,
            datamodule_class=datamodule_class,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=Parser,
            parser_kwargs=parser_kwargs,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands, and the arguments of their methods that the CLI passes itself."""
        passed = {command: {"model", "datamodule"} for command in commands.TRAINER}
        passed["fit"] |= {"federation", "train_dataloaders"}
        return passed

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser for the program or one command. Abbreviations are off, because a typo could set
        another key.
        """
        settings = {
            "prog": "lightning-fedssl",
            "description": commands.ABOUT,
            "epilog": commands.PRECEDENCE,
            "version": __version__,
            "dump_header": [f"lightning-fedssl {__version__}"],
            "allow_abbrev": False,
            "default_env": True,
            "env_prefix": "FEDSSL",
        }
        parser = Parser(**{**settings, **kwargs})
        about = "A YAML file, or the name of one of the package."
        parser.add_argument("-c", "--config", action=ConfigFile, help=about)
        return parser

    def setup_parser(self, add_subcommands: bool, *kwargs: dict[str, Any]) -> None:
        """Set up the parser; without a command it ignores the key ``ckpt_path``, which every
        printed file has.
        """
        super().setup_parser(add_subcommands, *kwargs)
        if not add_subcommands:
            self.parser.add_argument("--ckpt_path", type=str | None, help=argparse.SUPPRESS)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link arguments of the algorithm to the data, so that they need not be given twice."""
        for name in ("num_classes", "in_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.link_arguments("data", "model.init_args.task", _task_of, apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Refuse sections without keys, and to evaluate without a checkpoint, unless the weights
        come from a file.

        Raises:
            ValueError: If ``trainer`` or ``data`` is not a mapping, or ``ckpt_path`` is missing.
        """
        for key in ("trainer", "data"):
            if not isinstance(self._get(self.config, key), Namespace):
                raise ValueError(f"{key}: give keys and values below it, or leave it out")
        start = self._get(self.config, "model").get("init_args.init_from")
        weights = self._get(self.config, "ckpt_path") or start
        if self.subcommand == "predict" and weights is None:
            weights = self.config[self.subcommand].ckpt_path = "chosen"
        if self.subcommand not in (None, "fit") and weights is None:
            raise ValueError(
                f"{self.subcommand}: no checkpoint given: add --ckpt_path best (or last, or a "
                "file); without one the weights are untrained (model.init_from takes weights from "
                "elsewhere)"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """The trainer; ``fit`` uses all cores of a CPU unless ``trainer.devices`` is given."""
        if self.subcommand == "fit" and self._get(self.config_init, "trainer")["devices"] is None:
            kwargs["devices"] = "auto" if may_use_all_cores() else None
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Do nothing; Lightning would override the command line with the checkpoint's
        hyper-parameters.
        """


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's warnings about arguments from Python and about SLURM's srun, and its
    message of the seed.
    """
    with run_logger.quiet("lightning.fabric.utilities.seed"):
        warnings.filterwarnings("ignore", "The `srun` command is available")
        yield


def _task_of(data: FederatedDataModule) -> Task:
    return data.task
