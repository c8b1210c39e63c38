"""Says how far a comparison is, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm import tqdm

from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.results import rounds

FIRST = 10.0
"""Seconds before the first report. The wait grows by a quarter of the time so far, to ten minutes
at most."""


class SuiteProgress:
    """Prints a line for all runs, seldom in a long comparison.

    Args:
        runs: The runs to train.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._before = self._done()
        self._began = time.monotonic()
        self._next = FIRST

    def show(self) -> None:
        """Report, if it is time."""
        seconds = time.monotonic() - self._began
        if seconds < self._next:
            return
        self._next = seconds + min(FIRST + seconds / 4, 600)
        done, total = self._done(), sum(run.max_rounds for run in self._runs)
        left = tqdm.format_interval(seconds * (total - done) / max(done - self._before, 1))
        print(f"  all runs: round {done} of {total}, about {left} left", flush=True)

    def _done(self) -> int:
        return sum(len(rounds(run.folder)) for run in self._runs)
