"""Chooses the local trainer, and the number of clients that are stacked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

import torch
from lightning.fabric import Fabric
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_training import compatibility, sequential, split_learning, vectorized
from lightning_fedssl.local_training.cuda_graphs import FixedMemory
from lightning_fedssl.local_training.ops.stacked_optimizer import ELEMENTWISE
from lightning_fedssl.local_training.sequential import LocalTrainingObserver
from lightning_fedssl.local_training.split_learning import JointTrainingObserver
from lightning_fedssl.state import ClientUpdate

_log = logging.getLogger(__name__)


class LocalTraining:
    """Trains the clients of each round, with the local trainer that suits method and device.

    Args:
        clients_at_once: Clients trained together; ``auto``: one on a CPU, where stacking gains nothing, and on a CUDA
            device as many as fit into its memory.
        watchers: Names of callbacks that read the working module after each step of a client; with one of these,
            clients train sequentially.
        cuda_graphs: Clients that train together do so in memory that stays in place, and on a CUDA device their steps
            are recorded as graphs.

    Attributes:
        refusal: Why clients train one after another although ``clients_at_once`` is above 1; empty if they do not.
    """

    def __init__(
        self,
        clients_at_once: int | Literal["auto"] = "auto",
        watchers: Sequence[str] = (),
        cuda_graphs: bool = False,
    ) -> None:
        self.clients_at_once = clients_at_once
        self.watchers = watchers
        self.cuda_graphs = cuda_graphs
        self.memory: compatibility.StackMemory | None = None
        self.refusal = ""
        self._chosen: int | None = None
        self._trainer: FixedMemory | None = None

    def stacks(self, clients: Sequence[int], device: torch.device) -> list[Sequence[int]]:
        """The clients that one rank must train together; on a CPU a function of the round's clients alone.

        On other devices each client is on its own here: their memory decides which clients of a rank are stacked.

        Args:
            clients: The clients of the round, in drawn order.
            device: The ranks' kind of device.
        """
        return sampling.equal_parts(clients, stack_size(self.clients_at_once) if device.type == "cpu" else 1)

    def train_clients(
        self,
        algorithm: FederatedAlgorithm,
        stacks: Sequence[Sequence[LocalData]],
        optimizer: Optimizer,
        fabric: Fabric,
        observer: LocalTrainingObserver,
        max_steps: int | None = None,
        cohort: Iterable[LocalData] = (),
    ) -> Iterator[ClientUpdate]:
        """Train clients; see :func:`lightning_fedssl.local_training.sequential.train_clients`.

        Args:
            algorithm: The working module.
            stacks: The data of this rank's clients, in the stacks of :meth:`stacks`.
            optimizer: The clients' optimizer.
            fabric: Gives precision and the device.
            observer: Is called at every start, step and end.
            max_steps: Steps of a client at most.
            cohort: The data of the round's clients on all ranks, which then decide alike whether clients are stacked.
                Left out: this rank's clients.
        """
        clients = list(chain.from_iterable(stacks))
        if self._chosen is None:
            self._chosen = self.choose(algorithm, cohort or clients, optimizer, fabric)
        is_fixed = fabric.device.type == "cpu"
        at_once = (self._chosen or 1) if is_fixed else min(self._chosen or 1, len(clients))
        if at_once <= 1:
            return sequential.train_clients(algorithm, clients, optimizer, fabric, observer, max_steps)
        if self.cuda_graphs and (self._trainer is None or self._trainer.clients < at_once):
            self._trainer = FixedMemory(at_once)

        def halved(number: int) -> None:
            self._chosen = min(self._chosen or number, number)
            _log.warning(
                "trainer.clients_at_once: out of memory on %s; stacks have at most %d clients from now on",
                fabric.device,
                number,
            )

        def failed(error: Exception) -> None:
            self._warn(algorithm, fabric, compatibility.where(error), " whose stack fails")
            self._trainer = None  # its memory is free when this round has ended
            if not is_fixed:  # else other ranks would not know of it
                self._chosen = 1

        return chain.from_iterable(
            vectorized.train_clients(
                algorithm, together, optimizer, fabric, observer, max_steps, clients_at_once=self._chosen or 1,
                trainer=self._trainer, halved=halved, failed=failed,
            )
            for together in (stacks if is_fixed else [clients])
        )  # fmt: skip

    def train_jointly(
        self,
        algorithm: JointAlgorithm,
        stacks: Sequence[Sequence[LocalData]],
        client_optimizer: Optimizer,
        server_optimizer: Optimizer,
        server_data: LocalData,
        fabric: Fabric,
        observer: JointTrainingObserver,
        cohort: Sequence[int],
        max_steps: int | None = None,
    ) -> list[ClientUpdate]:
        """Train clients and server together; see :func:`lightning_fedssl.local_training.split_learning.train_jointly`.

        The activations of all clients of a step are in memory until the server has made its step; clients one after
        another save the gradients between layers of the others, about a quarter of the whole. So on a CUDA device
        ``auto`` stacks all of them without a compatibility check.
        """
        clients = list(chain.from_iterable(stacks))
        if fabric.device.type == "cuda":
            largest = max(len(clients), 1) if self.clients_at_once == "auto" else self.clients_at_once
            stacks = sampling.equal_parts(clients, largest)
        stacked = any(len(stack) > 1 for stack in stacks)

        def refuse(reason: str) -> None:
            self._warn(algorithm, fabric, reason)

        if stacked and (reason := _untried(client_optimizer)):
            refuse(reason)
            stacked = False
        key = "trainer.clients_at_once, " if stacked else ""
        remedy = f"lower {key}data.client_batch_size or trainer.clients_per_round, or share them out by trainer.devices"
        with vectorized.room_for(len(clients), fabric, remedy):
            return split_learning.train_jointly(
                algorithm, stacks if stacked else [[client] for client in clients], client_optimizer,
                server_optimizer, server_data, fabric, observer, cohort, max_steps, refuse,
            )  # fmt: skip

    def choose(
        self, algorithm: FederatedAlgorithm, clients: Iterable[LocalData], optimizer: Optimizer, fabric: Fabric
    ) -> int | None:
        """The number of clients to stack from now on; None if this round has too few clients to decide.

        Args:
            algorithm: The method, before its clients train.
            clients: The clients of the round.
            optimizer: The clients' optimizer.
            fabric: Gives precision and the device.
        """
        if self.clients_at_once == 1 or (self.clients_at_once == "auto" and fabric.device.type != "cuda"):
            return 1
        try:
            self._refuse_untried(optimizer)
            tried = compatibility.try_together(algorithm, clients)
            if not tried:
                return None
            if self.clients_at_once != "auto":
                return self.clients_at_once
            self.memory = compatibility.memory_of_stacks(algorithm, tried, optimizer, fabric, self.cuda_graphs)
            return self.memory.largest_number()
        except compatibility.CannotTrainTogetherError as reason:
            self._warn(algorithm, fabric, reason)
            return 1

    def _warn(self, algorithm: FederatedAlgorithm, fabric: Fabric, reason: object, which: str = "") -> None:
        if fabric.is_global_zero and self.refusal != str(reason):
            _log.warning(
                "trainer.clients_at_once is %s, but the clients of %s%s will train one after another: %s",
                self.clients_at_once, type(algorithm).__name__, which, reason,
            )  # fmt: skip
        self.refusal = str(reason)

    def _refuse_untried(self, optimizer: Optimizer) -> None:
        if reason := _untried(optimizer):
            raise compatibility.CannotTrainTogetherError(reason)
        if self.watchers:
            watchers = ", ".join(self.watchers)
            raise compatibility.CannotTrainTogetherError(f"{watchers} reads the model after every step")


def stack_size(clients_at_once: int | Literal["auto"]) -> int:
    """The largest stack on a CPU, where ``auto`` is one client."""
    return 1 if clients_at_once == "auto" else clients_at_once


def _untried(optimizer: Optimizer) -> str:
    """Why an optimizer may not be copied for stacked clients; empty if it may."""
    name, known = type(optimizer).__name__, ", ".join(kind.__name__ for kind in ELEMENTWISE)
    if type(optimizer) not in ELEMENTWISE:
        return f"the optimizer {name} is not known to update every weight separately; {known} are"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"the step of this {name} was replaced by a function of its own"
    return ""
