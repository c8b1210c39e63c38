"""The devices of a simulated federation: their speed and their availability."""

from lightning_fedssl.system.availability import Availability, DiurnalDropout, Outcome, RandomDropout, UnevenDropout
from lightning_fedssl.system.devices import Device, Duration, SystemModel, Usage, pick

__all__ = [
    "Availability",
    "Device",
    "DiurnalDropout",
    "Duration",
    "Outcome",
    "RandomDropout",
    "SystemModel",
    "UnevenDropout",
    "Usage",
    "pick",
]
