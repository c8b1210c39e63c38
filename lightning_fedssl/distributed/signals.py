"""What a run does on SIGINT and SIGTERM: it stops after the current round, or at once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

SAME_SECONDS = 1.0
"""Signals within this time are one: a terminal sends Ctrl-C to the ranks, and so does the calling
process."""

KILL_SECONDS = 3.0
"""How long ranks that are to end at once may remove what they have begun."""


def interruption(number: int) -> BaseException:
    """What ends the process at once, with the exit code that a shell expects after this signal: 130
    for SIGINT, 143 for SIGTERM.
    """
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class SignalHandler:
    """A context that handles SIGINT and SIGTERM.

    Attributes:
        number: The signal that was received last; 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._received = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and time.monotonic() - self._received < SAME_SECONDS:
            return
        is_first = not self.number
        self.number = number
        self._received = time.monotonic()
        self.on_signal(number, is_first)

    def on_signal(self, number: int, is_first: bool) -> None:
        """Do what the signal asks for.

        Args:
            number: The signal.
            is_first: Whether it is the first one.
        """
        raise interruption(number)


class StopRequest(SignalHandler):
    """A context in which one SIGINT or SIGTERM stops the run after the current round, and a second
    one at once.
    """

    def on_signal(self, number: int, is_first: bool) -> None:
        """Announce the end of the run; :func:`~lightning_fedssl.trainer.fit_loop.fit` ends it."""
        if not is_first:
            raise interruption(number)
        _log.warning(
            "%s: the run stops after this round; a second signal stops it at once and drops the "
            "round",
            signal.Signals(number).name,
        )


class RankSignals(SignalHandler):
    """A context in which a process passes one SIGINT or SIGTERM on to the ranks that it starts
    inside, which stop after their round. One before the first round, or a second one, ends all of
    them at once.

    Args:
        begun: A file that exists when every rank can finish its round.
        is_rank: Whether this process is a rank itself.
    """

    def __init__(self, begun: Path, is_rank: Callable[[], bool]) -> None:
        super().__init__()
        self._begun = begun
        self._is_rank = is_rank
        self._others = {*multiprocessing.active_children()}

    def on_signal(self, number: int, is_first: bool) -> None:
        """Pass the signal on; end the ranks."""
        if self._is_rank():  # in a round, StopRequest has the signal
            raise interruption(number)
        ranks = {*multiprocessing.active_children()} - self._others
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid or 0, number)
        if not is_first or not self._begun.exists():
            _kill(ranks)
            raise interruption(number)


def _kill(ranks: Iterable[BaseProcess]) -> None:
    """End processes that were asked to end: a rank that waits for another one handles no signal."""
    deadline = time.monotonic() + KILL_SECONDS
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()
