"""The simulated federation: what an algorithm's round may ask for, and what the local trainers report to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.federation import Direction
from lightning_fedssl.functional.averaging import State, WeightedSum
from lightning_fedssl.functional.batch_norm import Moments, local_moments, measuring_batches
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_training import sequential
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import ClientUpdate, load_optimizer_state, load_state
from lightning_fedssl.trainer.acceptance import judge
from lightning_fedssl.trainer.exchange import exchange, sends_all_updates
from lightning_fedssl.trainer.participation import Participation
from lightning_fedssl.trainer.run import Run
from lightning_fedssl.trainer.update_check import check_update

Stacks = Sequence[Sequence[int]]
"""Clients by number; those of one stack train on one rank, together."""


class SimulatedFederation:
    """Server and clients in one process per rank; see :class:`lightning_fedssl.federation.Federation`.

    It is also the observer of the local trainers: it counts what they report and calls the hooks of the callbacks.

    Args:
        run: The run.

    Attributes:
        client_seconds: Seconds in which this rank trained the clients of the last round that trained any.
        participation: Who takes part in the round.
        trained: What clients of this rank did in the round: False if one had batches to train on, and True if one has
            made a step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.client_seconds = 0.0
        self._client_sizes: list[int] = run.datamodule.statistics.sizes.tolist()
        self._server_phases = 0
        self.participation = Participation(run)
        self.trained: set[bool] = set()
        self._received: dict[int, State] = {}

    def start_round(self) -> None:
        """Begin a round: the next server phase is its first."""
        self._server_phases = 0
        self.trained = set()

    def end_round(self) -> None:
        """End a round, when the global model is final: nothing to do in a simulation."""

    # What an algorithm may ask for.

    @property
    def round_index(self) -> int:
        """The round, from 1."""
        return self.run.status.round_index

    @property
    def max_rounds(self) -> int:
        """The length of the run in rounds."""
        return self.run.trainer.max_rounds

    @property
    def progress(self) -> float:
        """The fraction of the run that is complete at the end of the current round."""
        return self.round_index / self.max_rounds

    @property
    def num_clients(self) -> int:
        """The number of all clients."""
        return self.run.datamodule.num_clients

    def reached(self, clients: Sequence[int]) -> Sequence[int]:
        """All of them."""
        return clients

    def moments(self, parties: Sequence[int], batch_size: int) -> Iterator[tuple[int, dict[str, Moments]]]:
        """Measure the batch-norm moments of parties, one after another, with the working module."""
        for party in parties:
            yield party, measure_moments(self.run.algorithm, self.run.local_data(party), batch_size)

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all validation images, on every rank."""
        return iter(self.run.datamodule.evaluation_batches("validate", self.run.trainer.dtype))

    @property
    def client_lr(self) -> float:
        """The learning rate of the clients' steps: this round's, or the present step's if it changes at every step."""
        return self.run.client_lr

    @property
    def cohort(self) -> Sequence[int]:
        """The clients of this round, in drawn order."""
        return self.run.status.cohort

    @property
    def clients_per_round(self) -> int:
        """The configured number of clients in a cohort, those included that are selected in excess."""
        return self.run.reporting.selected

    @property
    def server_optimizer(self) -> Optimizer:
        """The optimizer of the server's steps."""
        return self.run.server_optimizer

    def train_server(self) -> None:
        """Train the global model on the server's work."""
        run, algorithm, optimizer = self.run, self.run.algorithm, self.run.server_optimizer
        load_state(algorithm, algorithm.server.model())
        run.call("on_server_phase_start")
        # A second server phase in a round uses the random numbers of the next round, not those of the first phase
        # again.
        data = run.datamodule.local_data(
            sampling.SERVER, run.status.round_index + self._server_phases, run.trainer.dtype
        )
        self._server_phases += 1
        work = algorithm.on_server_start(data).limited(run.max_steps)
        if work.num_steps:
            if not algorithm.keep_server_optimizer:
                load_optimizer_state(optimizer, {})
            with sequential.own_random_stream(data):
                loop = sequential.Loop(algorithm, optimizer, run.fabric)
                loop.train(
                    work, algorithm.server_training_step, "server/loss",
                    lambda step: run.call("on_server_batch_end", step),
                )  # fmt: skip
            self._take_working_module()
        run.call("on_server_phase_end")

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort, and yield the accepted updates that this rank adds up.

        An update that the server rejects is counted (``client/refused``) and named in the log with the reason.
        """
        run = self.run
        run.call("on_client_phase_start")
        yield from self._updates(
            lambda stacks: run.local_training.train_clients(
                run.algorithm,
                self._data_of(stacks),
                run.client_optimizer,
                run.fabric,
                self,
                run.max_steps,
            )
        )

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort and the server together, step by step."""
        run, algorithm = self.run, self.run.algorithm
        if not isinstance(algorithm, JointAlgorithm):
            raise TypeError(f"{type(algorithm).__name__} must be a JointAlgorithm to train clients and server together")
        run.call("on_client_phase_start")
        load_state(algorithm, algorithm.server.model())
        if not algorithm.keep_server_optimizer:
            load_optimizer_state(run.server_optimizer, {})

        def train(stacks: Stacks) -> Iterator[ClientUpdate]:
            updates = run.local_training.train_jointly(
                algorithm, self._data_of(stacks), run.client_optimizer, run.server_optimizer,
                run.local_data(sampling.SERVER), run.fabric, self, run.status.cohort, run.max_steps,
            )  # fmt: skip
            self._take_working_module(lambda name: not algorithm.at_clients(name))
            return iter(updates)

        yield from self._updates(train)

    def reduce(self, sums: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
        """The sums over all ranks."""
        if self.run.fabric.world_size > 1 and not self._adds_in_order():
            for total in sums.values():
                collectives.reduce(self.run.fabric, total)
        self.run.call("on_aggregate")
        return sums

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Count tensors that the server and a client exchange, and report them to the callbacks."""
        self.participation.count_transfer(client, direction, sum(sizes.values()))
        self.run.transfer(client, direction, sizes)

    # What the local trainers report.

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: State) -> None:
        """A client has received its broadcast, of these bytes by name, and prepared its work."""
        self.transfer(data.party, "down", sizes)
        if work.num_steps:
            self.trained.add(False)
            self._received[data.party] = received
        self.run.counter.add("client/trained", float(work.num_steps > 0))
        self.run.counter.add("client/images", float(work.num_samples if work.num_steps else 0))
        self.run.call("on_client_start", data, work)
        if not work.num_steps:
            self.participation.outcomes[data.party] = "skipped"
            self.run.collector.commit(data.party)

    def images_labeled(self, indices: Tensor, pseudo: PseudoLabels) -> None:
        """Images of a client received pseudo-labels at a step; ``indices`` are their numbers in the training data."""
        self.run.call("on_pseudo_labels", indices, pseudo)

    def client_batch_ended(self, step: int) -> None:
        """A client has made a step."""
        self.trained.add(True)
        self.run.call("on_client_batch_end", step)

    def client_ended(self, update: ClientUpdate) -> None:
        """A client has finished."""
        self.transfer(update.client, "up", self.run.algorithm.upload_sizes(update))
        self.participation.count_steps(update)
        self.run.call("on_client_end", update)

    # Acceptance of updates.

    def client_judged(self, client: int, reason: str | None) -> None:
        """A client's update is accepted (no reason) or rejected."""
        self.participation.judged(client, reason)
        if reason is not None:
            self.run.counter.add("client/refused", 1)

    def _data_of(self, stacks: Stacks) -> list[list[LocalData]]:
        return [[self.run.local_data(client) for client in stack] for stack in stacks]

    def _adds_in_order(self) -> bool:
        """Whether every rank adds up all updates of a round, in the order of the cohort.

        Then weights do not depend on the number of ranks, not even in the last bit: floating-point sums depend on the
        order. The alternative is that each rank adds its own clients' updates and the ranks' sums are added. It sends
        less, so it is used for cohorts of large models. On other devices than a CPU no order gives equal bits: the
        clients of a rank are stacked as its memory allows, and kernels depend on how many are.
        """
        run = self.run
        several = run.fabric.world_size > 1 and run.fabric.device.type == "cpu"
        size = sum(t.nbytes for t in run.algorithm.server.model().values())
        return several and sends_all_updates(size, self.clients_per_round)

    def _updates(self, train: Callable[[Stacks], Iterator[ClientUpdate]]) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort; every rank then has the state of all clients.

        Yields:
            The accepted updates of all ranks in the order of the cohort, if they are added in order; else this rank's.
        """
        self.run.algorithm.clients.watch_changes()
        if not self._adds_in_order():
            yield from self._accepted(train)
            self._exchange([])
            return
        place = {client: index for index, client in enumerate(self.cohort)}
        yield from sorted(self._exchange(self._accepted(train)), key=lambda update: place[update.client])

    def _accepted(self, train: Callable[[Stacks], Iterator[ClientUpdate]]) -> Iterator[ClientUpdate]:
        """The accepted updates of this rank's share of the cohort, each valid until the next is requested."""
        started, fabric = time.perf_counter(), self.run.fabric
        present = self.participation.start(self.cohort)
        self._received.clear()
        stacks = self.run.local_training.stacks(present, fabric.device)
        share = sampling.share_out(stacks, self._client_sizes, fabric.world_size)[fabric.global_rank]
        absent = [client for client in self.cohort if client not in present]
        for client in absent[fabric.global_rank :: fabric.world_size]:
            self._drop(client)
        updates = self.participation.in_time(train(share))
        run = self.run
        for update, reason in judge(updates, self._sent_to, run.quarantine, run.gather, self._check, run.lr_factor):
            self._received.pop(update.client, None)  # a broadcast may be a model of its own for each client
            self.client_judged(update.client, reason)
            if reason is None:
                yield update
        self.client_seconds = time.perf_counter() - started

    def _check(self, update: ClientUpdate) -> str | None:
        """Why an update is not valid; None if it is."""
        return check_update(self.run.algorithm, update)

    def _sent_to(self, client: int) -> tuple[State, State]:
        """The weights and buffers that a client has received; one that its broadcast lacks is the server's."""
        received, server = self._received.get(client, {}), self.run.algorithm.server
        buffers = {name: t for name, t in server.buffers.items() if t.is_floating_point()}
        weights, buffers = (
            {name: received[name].to(t.device) if name in received else t for name, t in state.items()}
            for state in (server.parameters, buffers)
        )
        return weights, buffers

    def _drop(self, client: int) -> None:
        """A client receives its broadcast and drops out: it does not train, and its persistent state stays as it is."""
        algorithm = self.run.algorithm
        with algorithm.clients.stage(client):
            self.transfer(client, "down", algorithm.download_sizes(client, algorithm.broadcast(client)))
        algorithm.clients.discard(client)
        self.participation.outcomes[client] = "dropped"

    def _exchange(self, updates: Iterable[ClientUpdate]) -> list[ClientUpdate]:
        """Send this rank's updates to all ranks, what its clients have stored, and what became of them.

        Any rank may train any client next, so that all ranks store the state of all clients.

        Returns:
            The updates of all ranks, in rank order.

        Raises:
            ValueError: If clients of two ranks wrote the same state: one rank would keep the last of them, by chance.
        """
        fabric, clients = self.run.fabric, self.run.algorithm.clients
        if fabric.world_size == 1:
            return []
        everyone = exchange(fabric, updates, lambda: (clients.changes(), self.participation.own()))
        self.participation.publish(everyone.outcomes)
        seen: set[tuple[str, int]] = set()
        for rank, of_rank in enumerate(everyone.changes):
            if twice := sorted(seen & of_rank.keys()):
                raise ValueError(
                    f"{type(self.run.algorithm).__name__}: two clients of a round wrote the client state "
                    f"{twice[0][0]!r} of number {twice[0][1]}: give every client a number of its own in "
                    "self.clients.put"
                )
            seen |= of_rank.keys()
            if rank != fabric.global_rank:
                clients.apply(of_rank)
        return everyone.updates

    def _take_working_module(self, which: Callable[[str], bool] = lambda name: True) -> None:
        """Make the weights and buffers of the working module, or some of them, those of the global model."""
        algorithm, server = self.run.algorithm, self.run.algorithm.server
        server.update(
            {name: p.detach() for name, p in algorithm.named_parameters() if name in server.parameters and which(name)},
            {name: b.detach() for name, b in algorithm.named_buffers() if name in server.buffers and which(name)},
        )


def measure_moments(algorithm: FederatedAlgorithm, data: LocalData, batch_size: int) -> dict[str, Moments]:
    """The batch-norm moments of all images of a party by layer; a party with fewer than two images has none.

    Args:
        algorithm: The working module.
        data: The party's data.
        batch_size: Images per batch of the measurement.
    """
    indices = torch.cat([data.labeled, data.unlabeled])
    batches = measuring_batches(indices, batch_size)
    with sequential.own_random_stream(data, "batch-norm moments"):
        return local_moments(algorithm, map(data.plain, batches)) if len(indices) > 1 else {}
