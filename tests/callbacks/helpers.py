"""What the tests of callbacks share."""

from __future__ import annotations

from typing import Any


def events_of(trainer: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.log_dir))
    events.Reload()
    return events
