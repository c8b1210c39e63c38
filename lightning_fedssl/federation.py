"""What an algorithm's round may ask of the loop that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.state import ClientUpdate

Direction = Literal["down", "up"]
"""From the server to a client, or from a client to the server."""


class Federation(Protocol):
    """What the loop offers to an algorithm's :meth:`FederatedAlgorithm.round`."""

    @property
    def round_index(self) -> int:
        """The round, from 1."""

    @property
    def max_rounds(self) -> int:
        """The length of the run in rounds."""

    @property
    def client_lr(self) -> float:
        """eta, the learning rate of the clients' steps in this round."""

    @property
    def cohort(self) -> Sequence[int]:
        """The clients of this round, in drawn order, the same on every rank."""

    @property
    def clients_per_round(self) -> int:
        """C, the configured size of a cohort; a trial run's is smaller."""

    @property
    def server_optimizer(self) -> Optimizer:
        """The optimizer of the server's steps, with the state it has kept."""

    def train_server(self) -> None:
        """Train the global model on the server's work; the result is in ``algorithm.server``."""

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort, one update at a time; a client that sits out yields nothing."""

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort and the server together, step by step; see :class:`JointAlgorithm`.

        The server's part of the result is in ``algorithm.server`` when the first update is given.
        """

    def reduce(self, sums: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
        """The sums over all ranks."""

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Note that tensors cross between the server and a client, on the one rank that simulates this.

        Broadcasts and updates are noted by the engines; a method reports what it sends beside them.

        Args:
            client: The client.
            direction: ``down`` to the client or ``up`` to the server.
            sizes: Bytes of each tensor by its name.
        """
