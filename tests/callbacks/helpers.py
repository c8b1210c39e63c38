"""What the tests of callbacks share."""

from __future__ import annotations

from typing import Any

from lightning_fedssl.callbacks import PseudoLabelQuality


class NoDiagnostics(PseudoLabelQuality):
    """Takes the place of the diagnostics, and measures nothing."""

    def on_client_start(self, *args: Any) -> None:
        """Nothing."""


def events_of(trainer: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.log_dir))
    events.Reload()
    return events
