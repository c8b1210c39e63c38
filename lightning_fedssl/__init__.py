"""Federated semi-supervised learning with Lightning.

The classes of the package can be imported from here::

    from lightning_fedssl import MLP, FederatedDataModule, FederatedTrainer, SemiFL
"""

from __future__ import annotations

from lightning_fedssl import algorithms, callbacks, data, models, trainer
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import *
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import *
from lightning_fedssl.cli.experiment import Experiment
from lightning_fedssl.data import *
from lightning_fedssl.models import *
from lightning_fedssl.schedules import Constant, Cosine, FractionalCosine, Schedule
from lightning_fedssl.system import (
    Availability,
    Device,
    DiurnalDropout,
    RandomDropout,
    SystemModel,
    UnevenDropout,
)
from lightning_fedssl.trainer import *
from lightning_fedssl.version import __version__ as __version__

__all__ = [
    "Availability",
    "Constant",
    "Cosine",
    "Device",
    "DiurnalDropout",
    "Experiment",
    "FederatedAlgorithm",
    "FederatedCallback",
    "FractionalCosine",
    "RandomDropout",
    "Schedule",
    "SystemModel",
    "UnevenDropout",
]
__all__ += algorithms.__all__
__all__ += callbacks.__all__
__all__ += data.__all__
__all__ += models.__all__
__all__ += trainer.__all__
