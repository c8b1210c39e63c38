"""What a method knows of a run: the present round as a value, and what it may ask for in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.functional.batch_norm import LayerMoments
from lightning_fedssl.state import ClientUpdate, Direction


@dataclass(frozen=True)
class Round:
    """One round of a run: ``algorithm.current_round``.

    Attributes:
        index: t, its number from 1; 0 before the first.
        max_rounds: T, the number of rounds of the whole run.
        cohort: The clients of the round, in drawn order, the same on every rank.
        num_clients: M, the number of all clients.
        clients_per_round: C, the configured size of a cohort; ``fast_dev_run`` has fewer.
        client_lr: eta, the learning rate of the clients' steps; with a rate per step, that of the
            first.
        lr_factor: The schedule's larger factor of the learning rate of this round and the next; at
            most 1.
    """

    index: int = 0
    max_rounds: int = 1
    cohort: Sequence[int] = ()
    num_clients: int = 0
    clients_per_round: int = 0
    client_lr: float = 0.0
    lr_factor: float = 1.0

    @property
    def progress(self) -> float:
        """The fraction t / T of the run that is complete at the end of the round."""
        return self.index / self.max_rounds


class Federation(Protocol):
    """What a method may ask of the loop that runs it: ``algorithm.federation``, and the argument of
    its ``round``.

    Attributes:
        simulated: Whether all clients are in this process, so that a run can be repeated.
    """

    simulated: bool

    @property
    def server_optimizer(self) -> Optimizer:
        """The optimizer of the server's steps, with its persistent state."""

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Train the clients of the round, and yield the accepted updates of all ranks in the order
        of the cohort.

        So sums over the updates do not depend on the number of ranks, not even in the last bit. An
        update is valid until the next is requested. A client that skips the round yields nothing,
        and neither does one whose update is rejected, which is counted (``client/refused``) and
        named in the log with the reason.
        """

    def train_server(self) -> None:
        """Train the global model on the server's local work.

        The result is in ``algorithm.server``.
        """

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Train the clients of the round and the server together, step by step.

        See :class:`~lightning_fedssl.algorithm.JointAlgorithm`. The updates are yielded as in
        :meth:`train_clients`, when the trained part of the server is in ``algorithm.server``.
        """

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Report a communication between the server and a client, on the rank that simulates this
        client.

        The local trainers report broadcasts and updates; a method reports what it sends in addition
        to them.

        Args:
            client: The client.
            direction: ``down`` to the client or ``up`` to the server.
            sizes: Bytes of each tensor by its name.
        """

    def reachable(self, clients: Sequence[int]) -> Sequence[int]:
        """The clients, out of these, that a message of the server reaches now: in a simulation all.

        Args:
            clients: Their numbers.
        """

    def moments(
        self, parties: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, LayerMoments]]:
        """Measure the batch-norm moments of parties on all their images, with the weights of the
        working module.

        Args:
            parties: Clients, and ``sampling.SERVER`` for the server.
            batch_size: Images per batch of the measurement.

        Yields:
            A party and its moments by layer; none for a party with fewer than two images. In a
            deployment, a client that does not answer is left out.
        """

    def accepted_moments(self, moments: Mapping[int, LayerMoments]) -> LayerMoments:
        """The moments of all parties together, as the rules of ``trainer.updates`` judge and
        combine them. Every rank must call it.

        Args:
            moments: The moments of each party, of all ranks.

        Returns:
            The combined moments by layer; empty if none is accepted.
        """

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all validation images: inputs ``(batch, channels, height, width)`` and labels
        ``(batch,)``.
        """
