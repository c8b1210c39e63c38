"""The classes that a configuration may name without their modules."""

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


def public_classes() -> dict[str, object]:
    """What the parts of the package offer, by name."""
    return {name: getattr(part, name) for part in PARTS for name in part.__all__}
