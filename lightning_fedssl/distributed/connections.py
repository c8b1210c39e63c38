"""Connections between the ranks of one machine, for short messages that all ranks wait for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection

LONGEST = 2**14
"""Bytes of a message at most: every rank sends before it receives, so that messages must fit into a connection."""


class ConnectionToRankLostError(RuntimeError):
    """Another rank has ended; a collective of torch raises a RuntimeError, too."""


class Connections:
    """A connection between every two ranks.

    A collective of gloo passes a message through several threads, which takes three to four times the CPU time on busy
    cores. The connections are made before the ranks are forked, which inherit all of them and close those of others.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._rank: int | None = None
        self._ends: dict[int, dict[int, Connection]] = {rank: {} for rank in range(ranks)}
        for one, other in combinations(range(ranks), 2):
            self._ends[one][other], self._ends[other][one] = Pipe()

    def keep(self, rank: int) -> None:
        """Keep the connections of a rank: the caller's own. A rank that ends then closes its connections for others."""
        self._rank = rank
        _close(end for owner, ends in self._ends.items() if owner != rank for end in ends.values())

    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order.

        Args:
            message: At most :data:`LONGEST` bytes.

        Raises:
            ConnectionToRankLostError: If another rank has ended.
        """
        assert self._rank is not None, "keep() says which rank this is"
        own = self._ends[self._rank]
        try:
            for end in own.values():
                end.send_bytes(message)
            received = {rank: end.recv_bytes() for rank, end in own.items()}
        except (EOFError, ConnectionError) as error:
            raise ConnectionToRankLostError("Connection closed by peer") from error
        return [message if rank == self._rank else received[rank] for rank in range(len(self._ends))]

    def close(self) -> None:
        """Close all connections."""
        _close(end for ends in self._ends.values() for end in ends.values())


def _close(ends: Iterable[Connection]) -> None:
    for end in ends:
        end.close()
