"""Memory that all ranks of one machine can read, so that they exchange tensors without sending them."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

_SMALLEST = 2**12
"""Bytes of a file at least: an empty one cannot be mapped."""


class PrivateMemory:
    """Memory instead of :class:`SharedMemory`, for ranks that share none: what the others write must be sent."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Tensor] = {}

    def begin_exchange(self) -> None:
        """Nothing to do: the memory is used once."""

    def of_rank(self, rank: int, size: int) -> Tensor:
        """Memory for what a rank writes, ``(size,)`` uint8 or longer; see :meth:`SharedMemory.of_rank`."""
        before = self._of_rank.get(rank, torch.empty(0, dtype=torch.uint8))
        if len(before) < size:
            self._of_rank[rank] = torch.cat([before, before.new_empty(size - len(before))])
        return self._of_rank.get(rank, before)


class SharedMemory:
    """A file in memory for each rank: the rank writes to its own, and all ranks read it.

    It is created before the ranks are forked, which inherit the files. A file has no name, and the system frees it when
    the last rank ends, however that happens.

    Each rank has two files, which are used in turns (:meth:`begin_exchange`). An exchange writes, then waits until all
    ranks have written, then reads. So a rank that is still reading one file can at most meet a rank that writes the
    other: before a file is written again, all ranks have begun the exchange in between, and have read it.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._files = [[os.memfd_create("lightning_fedssl") for _ in range(2)] for _ in range(ranks)]
        self._mapped: dict[int, Tensor] = {}
        self._turn = 0

    def begin_exchange(self) -> None:
        """Use the other file of every rank from now on."""
        self._turn = 1 - self._turn

    def of_rank(self, rank: int, size: int) -> Tensor:
        """The memory of a rank, ``(size,)`` uint8 or longer; valid until the exchange after the next one begins.

        Args:
            rank: The rank. If it is the caller's own, the caller may write.
            size: Bytes. The file grows if it is smaller, and what was written stays.
        """
        file = self._files[rank][self._turn]
        if file not in self._mapped or len(self._mapped[file]) < size:
            if os.fstat(file).st_size < (at_least := max(size, _SMALLEST)):
                os.ftruncate(file, at_least)
            self._mapped[file] = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        return self._mapped[file]

    def close(self) -> None:
        """Close the files; memory that is still used stays until it is not."""
        self._mapped.clear()
        for file in (file for of_rank in self._files for file in of_rank):
            os.close(file)
        self._files.clear()
