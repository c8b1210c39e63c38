"""The parser of the commands that run a trainer, on Lightning's own."""

from __future__ import annotations

from typing import Any

import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fedssl import algorithms, callbacks, models
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli import parser
from lightning_fedssl.schedules import Schedule
from lightning_fedssl.system import Availability, SystemModel
from lightning_fedssl.trainer import FederatedTrainer

BASES: dict[str, type] = {
    **parser.BASES,
    "model": FederatedAlgorithm,
    "network": models.Network,
    "optimizer": Optimizer,
    "server_optimizer": Optimizer,
    "schedule": Schedule,
    "callbacks": Callback,
    "logger": Logger,
    "metrics": Metric,
    "system": SystemModel,
    "availability": Availability,
}
"""The base classes of all keys that name a class; bare names work for the classes that are imported here."""

_NAMED = (algorithms, callbacks)  # imported so that their classes can be given by bare names

# The default of an argument of Lightning's callback Timer; jsonargparse writes configurations with this dumper.
yaml.SafeDumper.add_representer(Interval, lambda dumper, interval: dumper.represent_str(interval.value))


class FederatedArgumentParser(parser.PlainArgumentParser, LightningArgumentParser):
    """Lightning's parser, which also accepts :class:`FederatedTrainer`, with plain error messages."""

    bases = BASES

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a class; Lightning's own method only accepts Lightning's trainer."""
        if lightning_class is not FederatedTrainer:
            return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        added: list[str] = self.add_class_arguments(
            FederatedTrainer, nested_key, fail_untyped=False, instantiate=False, sub_configs=True
        )
        for action in self._actions:
            if action.dest == f"{nested_key}.metrics":  # else the lines of a file of that name are the list
                vars(action)["_enable_path"] = False
        return added
