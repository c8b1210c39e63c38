"""Liars in a federation: simulated attackers, and rules that combine updates in spite of them."""

from lightning_fedssl.robust.aggregators import (
    Aggregator,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from lightning_fedssl.robust.attacks import (
    ALIE,
    Attack,
    LabelFlip,
    PseudoLabelPoison,
    SignFlip,
)

__all__ = [
    "ALIE",
    "Aggregator",
    "Attack",
    "GeometricMedian",
    "Krum",
    "LabelFlip",
    "Median",
    "MultiKrum",
    "PseudoLabelPoison",
    "SignFlip",
    "TrimmedMean",
]
