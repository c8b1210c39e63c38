"""Cohort slots: state that belongs to a position in the cohort instead of to a client.

The i-th user (client) of a round's cohort has slot i. State that persists between rounds (momentum,
batch-norm statistics, and weights for elastic averaging) is stored per slot, and the next user with
this slot continues from it. The code of FedRGD's authors does the same: it has one process per
slot, which simulates another user in each round. In these methods server and users each take T
steps, at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State, sizes_of
from lightning_fedssl.functional.dictionaries import add_prefix, map_values
from lightning_fedssl.functional.optimizer_states import load_optimizer_state, optimizer_state
from lightning_fedssl.functional.schedules import FractionalCosine, Schedule
from lightning_fedssl.local_work import LocalWork, labeled_work
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.round import Federation


@hyperparameters
class SlotAlgorithm(FederatedAlgorithm):
    """The base class of methods with cohort slots: federated averaging with supervised users, by
    default.

    Args:
        local_steps: T, steps of every user and of the server in a round; the schedule sets the
            learning rate of each step.
        keep_client_optimizer: The momentum of a slot persists between rounds.
        keep_server_optimizer: The momentum of the server persists between rounds.
        schedule: The learning rate; a 7/16 cosine over the run if left out.

    Attributes:
        server_phase: The server trains while its users do.
    """

    not_deployable = no_personal = (
        "keeps the momentum of its clients at the server, by their places in the cohort"
    )

    server_phase = "parallel"
    server_takes_part = True
    replica = 0

    local_steps: int = 16
    keep_client_optimizer: bool = True
    keep_server_optimizer: bool = True

    def default_schedule(self) -> Schedule:
        """A cosine to 0."""
        return FractionalCosine()

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 1, "local_steps")
        checks.refuse_epochs(self, "set model.local_steps")
        self.steps_per_round = self.local_steps
        self.slot_of: dict[int, int] = {}

    def check_data(self, data: FederatedDataModule) -> None:
        """Note whether the server has labelled images to train on."""
        super().check_data(data)
        self.server_takes_part = len(data.split.server_labeled) > 0

    def state_owner(self, client: int) -> int:
        """The slot of the client: optimizer states are stored per slot."""
        return self.slot_of[client]

    def round(self, federation: Federation) -> None:
        """Server and users train, each from its own weights; then the server averages."""
        self.train_servers(federation)
        self.aggregate(self.accumulate(federation.train_clients()))

    def on_round_start(self) -> None:
        """Give every user of the cohort a slot, in drawn order."""
        self.slot_of = {client: i for i, client in enumerate(self.current_round.cohort)}
        self.server.extra.setdefault("buffers", clone(self.server.buffers))

    def slot_buffers(self, slot: int) -> State:
        """A slot's batch-norm statistics; initially those of the initial model."""
        return {**self.server.extra["buffers"], **self.clients.get(slot, "buffers")}

    def download_sizes(self, client: int, received: State) -> Sizes:
        """The broadcast, and the momentum of the slot's last user."""
        return super().download_sizes(client, received) | self._momentum_sizes(client)

    def upload_sizes(self, update: ClientUpdate) -> Sizes:
        """The update, and the momentum for the slot's next user."""
        return super().upload_sizes(update) | self._momentum_sizes(update.client)

    def _momentum_sizes(self, client: int) -> Sizes:
        momentum = self.clients.get(self.state_owner(client), "optimizer")
        return add_prefix("optimizer.", sizes_of(momentum))

    def train_servers(self, federation: Federation) -> None:
        """Train the server at the same time as the users; by default it only averages."""

    def train_replicas(self, federation: Federation, count: int) -> list[State]:
        """Train several copies of the server's model, one after another.

        Returns the trained models.

        Each has its own batches, momentum and batch-norm statistics. The statistics of the first
        are evaluated.
        """
        if count == 1:
            federation.train_server()
            return [self.server.model()]
        start = clone(self.server.parameters)
        extra = self.server.extra
        trained = []
        starts = [clone(self.replica_buffers(replica)) for replica in range(count)]
        for replica in range(count):
            self.replica = replica
            buffers = f"buffers {replica}"
            momentum = f"optimizer {replica}"
            self.server.update({**start, **starts[replica]})
            load_optimizer_state(federation.server_optimizer, extra.get(momentum, {}))
            federation.train_server()
            trained.append(clone(self.server.model()))
            extra[buffers] = clone(self.server.buffers)
            if self.keep_server_optimizer:
                extra[momentum] = clone(optimizer_state(federation.server_optimizer))
        self.replica = 0
        self.server.update(extra["buffers 0"])
        return trained

    def replica_buffers(self, replica: int) -> State:
        """The batch-norm statistics of a server replica at the start of a round: those of its last
        round.

        Args:
            replica: Its number.
        """
        extra = self.server.extra
        return extra.get(f"buffers {replica}", extra["buffers"])

    def on_server_start(self, data: LocalData) -> LocalWork:
        """T labelled batches, different ones for each replica."""
        if self.replica:
            data = replace(data, seed=sampling.derive_key(data.seed, "replica", self.replica))
        return labeled_work(data, steps=self.local_steps)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """T labelled batches."""
        return labeled_work(data, steps=self.local_steps)


def group_sizes(groups: int | list[int], clients_per_round: int) -> list[int]:
    """|G_i|, the number of slots of each group.

    Args:
        groups: S, the number of groups, which differ in size by at most one; or the sizes.
        clients_per_round: C.

    Raises:
        ValueError: There are more groups than slots, or given sizes that do not add up to C.
    """
    slots = sum(groups) if isinstance(groups, list) else min(groups, clients_per_round)
    fits = slots == (clients_per_round if isinstance(groups, list) else groups)
    checks.require(
        fits,
        "groups",
        groups,
        f"they must divide trainer.clients_per_round, {clients_per_round} users",
    )
    if isinstance(groups, list):
        return groups
    each, remainder = divmod(clients_per_round, groups)
    return [each + 1] * remainder + [each] * (groups - remainder)


def clone(state: State) -> State:
    """A copy that shares no storage."""
    return map_values(Tensor.clone, state)
