"""The command line."""

from __future__ import annotations
import sys
from typing import Any
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, ArgsType
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.trainer import FederatedTrainer
import lightning_fedssl.algorithms, lightning_fedssl.callbacks, lightning_fedssl.data.partition, lightning_fedssl.models


class FederatedArgumentParser(LightningArgumentParser):
    def add_lightning_class_args(self, lightning_class, nested_key, subclass_mode=False, required=True):
        if isinstance(lightning_class, type) and issubclass(lightning_class, FederatedTrainer):
            return self.add_class_arguments(
                lightning_class, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
            )
        return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)


class FederatedCLI(LightningCLI):
    def __init__(self, args=None, run=True, **kw):
        super().__init__(
            model_class=FederatedAlgorithm,
            datamodule_class=FederatedDataModule,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=FederatedArgumentParser,
            subclass_mode_model=True,
            subclass_mode_data=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            args=args,
            run=run,
            **kw,
        )

    @staticmethod
    def subcommands():
        return {k: {"model", "datamodule"} for k in ("fit", "validate", "test", "predict")}

    def init_parser(self, **kw):  # runs for the main and every subcommand parser
        kw.setdefault("allow_abbrev", False)
        kw.setdefault("default_env", True)
        kw.setdefault("env_prefix", "FEDSSL")
        return super().init_parser(**kw)

    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.link_arguments("data.in_shape", "model.init_args.in_shape", apply_on="instantiate")

    def _parse_ckpt_path(self): ...


def main(args=None):
    FederatedCLI(args=args)
    return 0
