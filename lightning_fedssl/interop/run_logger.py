"""The run's logger as ``self.logger`` of a LightningModule; Lightning's own loggers kept quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers.logger import Logger


class RunLogger(Logger):
    """A run's logger as ``self.logger`` of a module; scalars enter the means over clients instead.

    Args:
        run: The logger of the run.
    """

    name = version = None

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    @property
    def experiment(self) -> Any:
        """What the run's logger writes with."""
        return self._run.experiment

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run logs the means."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run has logged its own."""


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Inside, a logger of Lightning's shows errors alone; filters of warnings last as long.

    Args:
        name: The logger.
    """
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        log.setLevel(level)
