"""The C library's allocator: freed memory stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's settings (malloc.h)."""
KEPT = 512 << 20
"""Bytes of free memory that are kept, if a run has used so many."""
FROM_HEAP = 32 << 20
"""Blocks of at most this size come from memory that is kept; glibc allows no more. Larger ones are returned."""


def keep_freed_memory() -> None:
    """Keep freed memory instead of returning it to the system; has no effect with another C library than glibc.

    By default glibc returns the memory of a step's activations, and the next step gets it back page by page: that took
    4 to 11 % of a step of most convolutional networks (benchmarks/results/freed_memory.md). Results and peak memory are
    the same.
    The user's own settings (``MALLOC_...`` and ``GLIBC_TUNABLES`` of the environment) stay as they are.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT)
        mallopt(_MMAP_THRESHOLD, FROM_HEAP)
