"""The parts of the package whose classes a configuration may name without their modules."""

from __future__ import annotations

from lightning_fedssl import (
    algorithms,
    callbacks,
    data,
    models,
    system,
    task,
    trainer,
    updates,
)
from lightning_fedssl.functional import schedules

PARTS = (algorithms, callbacks, data, models, schedules, system, task, trainer, updates)
