"""Stops a run after the current round on SIGINT and SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)

SAME_SECONDS = 1.0
"""Signals within this time are one: a terminal sends Ctrl-C to the ranks, and so does the calling
process."""


class StopRequest:
    """A context in which one SIGINT or SIGTERM stops the run after the current round, and a second
    one at once.

    Attributes:
        signal_name: The name of the signal that was received, or None.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._received = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:
            if time.monotonic() - self._received < SAME_SECONDS:
                return
            raise KeyboardInterrupt
        self.signal_name, self._received = signal.Signals(number).name, time.monotonic()
        _log.warning(
            "%s: the run stops after this round; a second signal stops it at once and drops the "
            "round",
            self.signal_name,
        )
