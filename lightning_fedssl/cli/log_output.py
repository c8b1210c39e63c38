"""Where the package's log messages appear."""

from __future__ import annotations

import logging
import os

from tqdm import tqdm


def is_first_on_machine() -> bool:
    """Whether this process prints errors: of several ranks only the first does, because all fail in
    the same way.
    """
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


class _AboveBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def show_log() -> None:
    """Print the package's log messages, once for all ranks, unless the caller has configured
    logging.
    """
    log = logging.getLogger("lightning_fedssl")
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(_AboveBars())
        log.setLevel(logging.INFO if is_first_on_machine() else logging.ERROR)
