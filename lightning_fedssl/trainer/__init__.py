"""The trainer: its keys and commands, the loop over rounds, evaluation, checkpoints and the start
of processes.
"""

from lightning_fedssl.robust import (
    ALIE,
    Aggregator,
    Attack,
    GeometricMedian,
    Krum,
    LabelFlip,
    Median,
    MultiKrum,
    PseudoLabelPoison,
    SignFlip,
    TrimmedMean,
)
from lightning_fedssl.trainer.privacy import CentralDP
from lightning_fedssl.trainer.trainer import FederatedTrainer

__all__ = [
    "ALIE",
    "Aggregator",
    "Attack",
    "CentralDP",
    "FederatedTrainer",
    "GeometricMedian",
    "Krum",
    "LabelFlip",
    "Median",
    "MultiKrum",
    "PseudoLabelPoison",
    "SignFlip",
    "TrimmedMean",
]
