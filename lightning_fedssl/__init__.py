"""Federated semi-supervised learning with Lightning.

The classes of the package can be imported from here::

    from lightning_fedssl import MLP, FederatedDataModule, FederatedTrainer, SemiFL

A class is imported when it is first asked for, because PyTorch and Lightning take seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fedssl.version import __version__ as __version__

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm as FederatedAlgorithm
    from lightning_fedssl.algorithms import *
    from lightning_fedssl.callback import FederatedCallback as FederatedCallback
    from lightning_fedssl.callbacks import *
    from lightning_fedssl.cli.experiment import Experiment as Experiment
    from lightning_fedssl.data import *
    from lightning_fedssl.functional.schedules import Constant as Constant
    from lightning_fedssl.functional.schedules import Cosine as Cosine
    from lightning_fedssl.functional.schedules import FractionalCosine as FractionalCosine
    from lightning_fedssl.functional.schedules import Schedule as Schedule
    from lightning_fedssl.models import *
    from lightning_fedssl.round import Federation as Federation
    from lightning_fedssl.round import Round as Round
    from lightning_fedssl.run import Run as Run
    from lightning_fedssl.run import TrainerView as TrainerView
    from lightning_fedssl.storage.hyperparameters import hyperparameters as hyperparameters
    from lightning_fedssl.system import Availability as Availability
    from lightning_fedssl.system import Device as Device
    from lightning_fedssl.system import RandomDropout as RandomDropout
    from lightning_fedssl.system import SystemModel as SystemModel
    from lightning_fedssl.task import Classification as Classification
    from lightning_fedssl.task import MultiLabel as MultiLabel
    from lightning_fedssl.task import Regression as Regression
    from lightning_fedssl.task import Segmentation as Segmentation
    from lightning_fedssl.task import Task as Task
    from lightning_fedssl.trainer import *
    from lightning_fedssl.updates import *

_MODULES = {
    "algorithm": "FederatedAlgorithm",
    "algorithms": """
        CBAFed EASGD FL2 FedAvg FedDB FedMatch FedRGD FedSHVR FedSwitch FedSwitchSL
        FixMatch MeanTeacher OverlapSGD ProxyFL PseudoLabel RSCFed SAGE SCAFFOLD SelfTraining SemiFL
        SemiSFL Supervised UDA
    """,
    "callback": "FederatedCallback",
    "callbacks": """
        ClientEvaluation CollapseDetector CommunicationLedger
        EMATeacher FederatedCheckpoint GlobalUpdateFrequency
        LabelsAlone
        PseudoLabelQuality RoundProgress RunReport RunResult StaticBatchNorm
        SystemClock
    """,
    "cli.experiment": "Experiment",
    "data": """
        Arrays BatchView BreastCancer ClassMismatch ClassSkew ClientDirichlet
        ClientTypes Columns Compose DataSource Datasets Dirichlet FeatureMask
        FederatedDataModule FederatedSplit FlowerPartitions FromFile FromLightning
        FullyLabeledClients GaussianNoise Iid ImageFolder ImageList ImageTable LabeledClasses
        LoadedData LocalData MaskFolders NaturalClients PairedDirichlet Partition PerSample Pooled
        Scaling Shards Signals SiteFolders SplitRequest Stratified Table TimeMask Views Visits
    """,
    "functional.optimizers": "FedOpt",
    "functional.schedules": "Constant Cosine FractionalCosine Schedule",
    "models": """
        AlexNet Backbone CNN CNN13 EMNISTCNN MLP Network NetworkFactory NormKind RandomKernels
        ResNet18 ResNet8 ResNet9 SVHNCNN SignalCNN StaticBatchNorm2d TimmBackbone TimmLoRA UNet
        VGG11 VGG16 WideResNet build_network make_norm
    """,
    "storage.hyperparameters": "hyperparameters",
    "system": "Availability Device RandomDropout SystemModel",
    "task": "Classification MultiLabel Regression Segmentation Task",
    "round": "Federation Round",
    "run": "Run TrainerView",
    "trainer": "FederatedTrainer",
    "updates": """
        Aggregator Arrival Attack CentralDP Krum Median
        PseudoLabelPoison Quarantine SignFlip TrimmedMean UpdateRule
    """,
}
"""Where the classes come from."""

_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """A class, or a folder of the package."""
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
