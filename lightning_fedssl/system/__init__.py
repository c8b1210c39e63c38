"""The devices of a simulated federation: their speed and their availability."""

from lightning_fedssl.system.availability import (
    Availability,
    Outcome,
    RandomDropout,
)
from lightning_fedssl.system.devices import Device, Duration, SystemModel, Usage
from lightning_fedssl.system.faults import Faults

__all__ = [
    "Availability",
    "Device",
    "Duration",
    "Faults",
    "Outcome",
    "RandomDropout",
    "SystemModel",
    "Usage",
]
