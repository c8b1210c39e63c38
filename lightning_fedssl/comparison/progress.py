"""Says how far the runs of a comparison are, and how long the others will take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm import tqdm

from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.results import rounds

FIRST = 10.0
"""Seconds before the first report; the next ones come after a quarter of the time so far."""


class SuiteProgress:
    """Prints a line for each run that is training and one for all, seldom in a long comparison.

    Args:
        runs: The runs to train.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._before = sum(self._done().values())
        self._began = time.monotonic()
        self._next = FIRST

    def show(self, training: Sequence[Run]) -> None:
        """Report on the runs that are training, if it is time."""
        seconds = time.monotonic() - self._began
        if seconds < self._next:
            return
        self._next = seconds + min(max(FIRST, seconds / 4), 60 * FIRST)
        each = self._done()
        for run in training:
            print(f"  {run.name}: round {each[run.name]} of {run.max_rounds}")
        done, total = sum(each.values()), sum(run.max_rounds for run in self._runs)
        left = seconds * (total - done) / max(done - self._before, 1)
        print(
            f"  all runs: round {done} of {total}, about {tqdm.format_interval(left)} left",
            flush=True,
        )

    def _done(self) -> dict[str, int]:
        return {run.name: len(rounds(run.folder)) for run in self._runs}
