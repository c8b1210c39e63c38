"""The trainer: its keys and commands, the loop over rounds, evaluation, checkpoints and the start
of processes.
"""

from lightning_fedssl.trainer.aggregators import (
    Aggregator,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from lightning_fedssl.trainer.attacks import (
    ALIE,
    Attack,
    GaussianUpdate,
    LabelFlip,
    PseudoLabelPoison,
    ScaledUpdate,
    SignFlip,
)
from lightning_fedssl.trainer.privacy import CentralDP
from lightning_fedssl.trainer.trainer import FederatedTrainer

__all__ = [
    "ALIE",
    "Aggregator",
    "Attack",
    "CentralDP",
    "FederatedTrainer",
    "GaussianUpdate",
    "GeometricMedian",
    "Krum",
    "LabelFlip",
    "Median",
    "MultiKrum",
    "PseudoLabelPoison",
    "ScaledUpdate",
    "SignFlip",
    "TrimmedMean",
]
