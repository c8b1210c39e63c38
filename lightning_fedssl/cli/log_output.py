"""Where the package's log messages appear."""

from __future__ import annotations

import logging
import os


def is_first_on_machine() -> bool:
    """Whether this process prints errors: of several ranks only the first does, because all fail in
    the same way.
    """
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def show_log() -> None:
    """Print the package's log messages, once for all ranks, unless the caller has configured
    logging.
    """
    log = logging.getLogger("lightning_fedssl")
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO if is_first_on_machine() else logging.ERROR)
