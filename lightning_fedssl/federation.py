"""What an algorithm may ask of the loop that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.functional.batch_norm import Moments
from lightning_fedssl.state import ClientUpdate

Direction = Literal["down", "up"]
"""From the server to a client, or from a client to the server."""


class Federation(Protocol):
    """The context of an algorithm: ``algorithm.federation`` for a whole run, and the argument of its ``round``."""

    @property
    def round_index(self) -> int:
        """t, the number of the current round, from 1; 0 before the first."""

    @property
    def max_rounds(self) -> int:
        """T, the number of rounds of the whole run."""

    @property
    def progress(self) -> float:
        """The fraction t / T of the run that is complete at the end of the current round."""

    @property
    def num_clients(self) -> int:
        """M, the number of all clients."""

    @property
    def client_lr(self) -> float:
        """eta, the learning rate of the clients' steps in this round; with a rate per step, that of the last step."""

    @property
    def cohort(self) -> Sequence[int]:
        """The clients of this round, in drawn order, the same on every rank."""

    @property
    def clients_per_round(self) -> int:
        """C, the configured size of a cohort; with ``fast_dev_run`` a cohort is smaller."""

    @property
    def server_optimizer(self) -> Optimizer:
        """The optimizer of the server's steps, with its persistent state."""

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all validation images: inputs ``(batch, channels, height, width)`` and labels ``(batch,)``."""

    def reached(self, clients: Sequence[int]) -> Sequence[int]:
        """Those of some clients that a message of the server reaches now: all of them in a simulation."""

    def moments(self, parties: Sequence[int], batch_size: int) -> Iterator[tuple[int, dict[str, Moments]]]:
        """Measure the batch-norm moments of parties on all their images, with the weights of the working module.

        Args:
            parties: Clients, and ``sampling.SERVER`` for the server.
            batch_size: Images per batch of the measurement.

        Yields:
            A party and its moments by layer; none for a party with fewer than two images. In a deployment, a client
            that does not answer is left out.
        """

    def train_server(self) -> None:
        """Train the global model on the server's local work; the result is in ``algorithm.server``."""

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort, and yield the updates to add up, one at a time.

        On a CPU with several ranks these are the updates of all ranks in the order of the cohort, so that sums do not
        depend on the ranks; for cohorts of large models, and on other devices, they are those of this rank. A client
        that skips the round yields nothing, and neither does one whose update is rejected.
        """

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort and the server together, step by step; see :class:`JointAlgorithm`.

        The updates are yielded as in :meth:`train_clients`.

        The trained part of the server is in ``algorithm.server`` when the first update is yielded.
        """

    def reduce(self, sums: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
        """The sums over the updates of all ranks, computed from the sums over those that this rank was given."""

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Report a communication between the server and a client, on the rank that simulates this client.

        The local trainers report broadcasts and updates; a method reports what it sends in addition to them.

        Args:
            client: The client.
            direction: ``down`` to the client or ``up`` to the server.
            sizes: Bytes of each tensor by its name.
        """
