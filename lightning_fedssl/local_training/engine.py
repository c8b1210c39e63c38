"""Chooses the local trainer, and the number of clients that are stacked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.returned import place_of
from lightning_fedssl.functional.stacked_optimizer import ELEMENTWISE
from lightning_fedssl.local_training import sequential, split_learning, vectorized
from lightning_fedssl.local_training.ready import room_for
from lightning_fedssl.local_training.sequential import ClientPhase
from lightning_fedssl.local_training.split_learning import JointPhase
from lightning_fedssl.local_training.stack_memory import StackMemory
from lightning_fedssl.state import ClientUpdate

_log = logging.getLogger(__name__)

ClientsAtOnce = int | Literal["auto"]

CUDA_STACK = 10
"""Clients in a stack on a CUDA device with ``clients_at_once: auto``: the papers' cohorts, and
enough to fill it."""

FULL_BATCH = 100_000
"""Values in a batch from which on ``auto`` does not stack: one client's steps fill a CUDA device.

On one NVIDIA H200 a step of ten clients with 31,000 (SemiFL) takes 13 ms stacked and 39 on streams
(benchmarks/results/gpu_limits.csv); a round of eight with 393,000 (SAGE) takes as long either way
(gpu_rounds.csv).
"""


FEWEST, CPU_STACK = 20, 25
"""The smallest number of clients of a round that ``auto`` stacks on a CPU, and the largest number
in a stack.

One rank trains a stack, so with fewer clients two ranks that train one after another are as fast.
Stacks of 50 gain no more than those of 25: they take 1.36 and 1.41 times as long as the tight loop
of benchmarks/run.py, clients one by one 2.2 times.
"""

SMALL = 400_000
"""Up to so many weights times images of a batch, and so many numbers in all images of a client,
``auto`` stacks clients on a CPU.

One thread of an AMD EPYC (Zen 4), PyTorch 2.15, CPU time of a step of 10 and 20 clients over that
of one after another: 1,000 weights, batches of 10: 0.50 and 0.30; 30,730: 0.9 and 0.48; 7,850,
batches of 100: 1.1 and 0.52; 100,010, batches of 10: 1.2 and 0.99. Of 5 clients about 1; with
batches of other shapes at every end of an epoch 0.75 to 1.4.
"""


class LocalTraining:
    """Trains the clients of each round, with the local trainer that suits method and device.

    Layers that draw random numbers, such as dropout, draw others for stacked clients than for
    sequential ones.

    Args:
        clients_at_once: Clients trained together; ``auto``: as :func:`cpu_stack_size` and
            :func:`cuda_stack_size` say, or all clients of a rank for split learning on a CUDA
            device.

    Attributes:
        refusal: Why clients train one after another although ``clients_at_once`` is above 1; empty
            if they do not.
        memory: The stacked tensors and recorded steps of the run.
    """

    def __init__(self, clients_at_once: ClientsAtOnce = "auto") -> None:
        self.clients_at_once = clients_at_once
        self.refusal = ""
        self.memory = StackMemory()

    def stacks(
        self, clients: Sequence[int], device: torch.device, auto: int = 1
    ) -> list[Sequence[int]]:
        """The clients that one rank must train together; on a CPU a function of the round's clients
        alone.

        On other devices each client is a stack here, so that all ranks get work; the clients that a
        rank gets are then stacked.

        Args:
            clients: The clients of the round, in drawn order.
            device: The ranks' kind of device.
            auto: The largest stack on a CPU with ``clients_at_once: auto``.
        """
        size = stack_size(self.clients_at_once, auto)
        return sampling.equal_parts(clients, size if device.type == "cpu" else 1)

    def train_clients(
        self, phase: ClientPhase, stacks: Sequence[Sequence[LocalData]]
    ) -> Iterator[ClientUpdate]:
        """Train clients; see :func:`lightning_fedssl.local_training.sequential.train_clients`.

        Args:
            phase: What they are trained with.
            stacks: The data of this rank's clients, in the stacks of :meth:`stacks`.
        """
        auto = cuda_stack_size(chain.from_iterable(stacks))
        stacks = self._stacks_of_rank(stacks, phase.fabric.device, auto)
        if all(len(stack) == 1 for stack in stacks) or not self._may_stack(phase):
            return sequential.train_clients(phase, chain.from_iterable(stacks))

        def failed(error: Exception) -> None:
            self._warn(phase, place_of(error))

        return chain.from_iterable(
            vectorized.train_clients(phase, stack, failed, self.memory) for stack in stacks
        )

    def train_jointly(
        self, phase: JointPhase, stacks: Sequence[Sequence[LocalData]]
    ) -> list[ClientUpdate]:
        """Train clients and server together.

        See :func:`lightning_fedssl.local_training.split_learning.train_jointly`.

        The activations of all clients of a step are in memory until the server has made its step,
        stacked or not.

        Raises:
            ValueError: The precision scales the loss, which has no meaning for the gradients of
                features.
        """
        if _scales_loss(phase.fabric):
            raise ValueError(
                "trainer.precision: split learning needs one that scales no loss, such as "
                "bf16-mixed"
            )
        clients = [*chain.from_iterable(stacks)]
        stacks = self._stacks_of_rank(stacks, phase.fabric.device, len(clients))
        if any(len(stack) > 1 for stack in stacks) and not self._may_stack(phase):
            stacks = [[client] for client in clients]
        with room_for(len(clients), phase.fabric):
            return split_learning.train_jointly(phase, stacks)

    def _stacks_of_rank(
        self, stacks: Sequence[Sequence[LocalData]], device: torch.device, auto: int
    ) -> Sequence[Sequence[LocalData]]:
        """The stacks as they are on a CPU; on a CUDA device those of the rank's clients, with
        ``auto`` this many.
        """
        if device.type != "cuda":
            return stacks
        size = max(stack_size(self.clients_at_once, auto), 1)
        return sampling.equal_parts([*chain.from_iterable(stacks)], size)

    def _may_stack(self, phase: ClientPhase) -> bool:
        """Whether optimizer, callbacks and precision allow stacked clients.

        If not, a warning says why.
        """
        reason = ""
        if type(phase.optimizer) not in ELEMENTWISE:
            name = type(phase.optimizer).__name__
            reason = (
                f"the optimizer {name} is not known to update every weight separately; SGD, Adam "
                "and most others of torch.optim are"
            )
        elif phase.batch_ended and not isinstance(phase, JointPhase):
            reason = "a callback reads the model after every step (on_client_batch_end)"
        elif _scales_loss(phase.fabric):
            reason = "trainer.precision scales the loss of each client"
        if reason:
            self._warn(phase, reason)
        return not reason

    def _warn(self, phase: ClientPhase, reason: str) -> None:
        expected = self.clients_at_once == "auto" and phase.fabric.device.type == "cpu"
        if phase.fabric.is_global_zero and self.refusal != reason and not expected:
            _log.warning(
                "trainer.clients_at_once is %s, but the clients of %s train one after another: %s",
                self.clients_at_once, type(phase.algorithm).__name__, reason,
            )  # fmt: skip
        self.refusal = reason


def stack_size(clients_at_once: ClientsAtOnce, auto: int = 1) -> int:
    """The largest stack on a CPU.

    Args:
        clients_at_once: As the user gave it.
        auto: The largest stack with ``auto``.
    """
    return auto if clients_at_once == "auto" else clients_at_once


def cpu_stack_size(algorithm: FederatedAlgorithm, data: LocalData, numbers: Sequence[int]) -> int:
    """The most clients that ``auto`` stacks on a CPU: many where their steps are small, or one.

    Stacks gain where the steps of many clients take less than the calls of PyTorch, and
    where clients have batches of equal shapes: others need calls of their own.

    Args:
        algorithm: The working module. The step of its class must not change from round to round
            (``same_step_every_round``), and its network must have no convolutions.
        data: The data of one client of the round.
        numbers: The numbers of images of all clients of the round.
    """
    weights = [*algorithm.parameters()]
    is_same_step = vars(type(algorithm)).get("same_step_every_round")
    flat = all(p.dim() <= 2 for p in weights)
    alike = len(numbers) >= FEWEST and max(numbers) - min(numbers) <= 1
    products = data.batch_size * sum(p.numel() for p in weights)
    values = max(numbers) * data.images.shape[1:].numel()  # the views of all are in memory at once
    return CPU_STACK if is_same_step and flat and alike and max(products, values) <= SMALL else 1


def cuda_stack_size(clients: Iterable[LocalData]) -> int:
    """The clients that ``auto`` stacks on a CUDA device: ten, or one where batches are large.

    Args:
        clients: The data of the clients of a rank.
    """
    sizes = [data.batch_size * data.images.shape[1:].numel() for data in clients]
    return CUDA_STACK if sizes and max(sizes) < FULL_BATCH else 1


def _scales_loss(fabric: Fabric) -> bool:
    """Whether the precision multiplies losses, as 16-mixed does, with a factor that depends on all
    earlier steps.
    """
    precision = fabric.strategy.precision
    return isinstance(precision, MixedPrecision) and precision.scaler is not None
