"""Stops a run after the current round on SIGINT and SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the process by ``SystemExit``, so that an unused run folder is removed; exit code 143.

    While rounds run, :class:`StopRequest` handles the signal instead.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopRequest:
    """A context in which one SIGINT or SIGTERM stops the run after the current round, and a second one at once.

    Attributes:
        signal_name: The name of the signal that was received, or None.
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
        _log.warning(
            "%s: the run stops after this round; a second signal stops it at once and drops the round", self.signal_name
        )
