"""Stopping a run in an orderly way on SIGINT and SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)


class StopRequest:
    """While it is entered, one SIGINT or SIGTERM asks for a stop after the round in hand, a second drops the round.

    Attributes:
        signal_name: The signal that asked, or None.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        _log.warning("%s: finishing the round in hand, then saving; once more drops the round", self.signal_name)
