"""What happens to clients' updates: attacks, acceptance, robust rules, differential privacy."""

from lightning_fedssl.updates.acceptance import Quarantine
from lightning_fedssl.updates.aggregators import (
    Aggregator,
    Krum,
    Median,
    TrimmedMean,
)
from lightning_fedssl.updates.attacks import Attack, PseudoLabelPoison, SignFlip
from lightning_fedssl.updates.privacy import CentralDP
from lightning_fedssl.updates.rule import Arrival, UpdateRule

__all__ = [
    "Aggregator",
    "Arrival",
    "Attack",
    "CentralDP",
    "Krum",
    "Median",
    "PseudoLabelPoison",
    "Quarantine",
    "SignFlip",
    "TrimmedMean",
    "UpdateRule",
]
