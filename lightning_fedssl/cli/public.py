"""The parts of the package whose classes a configuration may name without their modules."""

from __future__ import annotations

from lightning_fedssl import (
    algorithms,
    callbacks,
    data,
    models,
    schedules,
    system,
    task,
    trainer,
    updates,
)

PARTS = (algorithms, callbacks, data, models, schedules, system, task, trainer, updates)
