"""What a method may ask for in a round: of any run, and of one whose clients this process
simulates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.functional.averaging import Sizes, State, sizes_of
from lightning_fedssl.functional.batch_norm import LayerMoments
from lightning_fedssl.functional.dictionaries import select, tensors_of
from lightning_fedssl.functional.optimizer_states import load_optimizer_state
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_training import sequential
from lightning_fedssl.local_training.engine import cpu_stack_size
from lightning_fedssl.local_training.moments import measure_moments
from lightning_fedssl.local_training.sequential import ClientPhase
from lightning_fedssl.local_training.split_learning import JointPhase
from lightning_fedssl.local_training.step_work import step_work
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.round import Federation
from lightning_fedssl.run import Run
from lightning_fedssl.state import ClientUpdate, Direction, load_state
from lightning_fedssl.trainer.judge import Judge

BYTES: dict[Direction, str] = {
    "down": "communication/download_bytes",
    "up": "communication/upload_bytes",
}
"""The scalar that counts the bytes of each direction."""


class RunFederation(Federation):
    """What every run gives its method: the server, whose training is the same in a simulation and
    in a deployment, and the judge of the clients' updates. Subclasses train the clients.

    Args:
        run: The run.

    Attributes:
        judge: Judges the updates of the clients.
        takes_steps: Whether a client of this rank has begun steps that ``training_step`` makes.
    """

    takes_steps = False

    def __init__(self, run: Run) -> None:
        self.run = run
        self.judge = Judge(run.algorithm, run.fabric, run.hooks, run.scalars)
        self._client_sizes: list[int] = run.datamodule.statistics.sizes.tolist()
        self._server_phases = 0

    def start_round(self) -> None:
        """Begin a round: the next server phase is its first.

        Before the first one, sites send what they state of their classes.
        """
        self._server_phases = 0
        if self.run.round.index == 1 and self.run.fabric.is_global_zero:
            for client, stated in self.run.datamodule.shares.items():
                self.transfer(client, "up", {"class shares": 8 * len(stated.shares)})

    def end_round(self) -> None:
        """End a round, when the global model is final."""

    @property
    def server_optimizer(self) -> Optimizer:
        """See :meth:`Federation.server_optimizer`."""
        return self.run.server_optimizer

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """See :meth:`Federation.transfer`."""
        self.run.scalars.count({BYTES[direction]: sum(sizes.values())})
        self.run.hooks.call("on_transfer", client, direction, sizes)

    def start_clients(self) -> list[int]:
        """Begin a phase of client training; returns the clients of all ranks that do not drop out.

        A client that drops out receives its broadcast and nothing else happens: its persistent
        state stays as it is.
        """
        run = self.run
        cohort = run.round.cohort
        run.hooks.call("on_client_phase_start")
        drops_out = run.settings.faults.drops_out
        absent = [k for k in cohort if drops_out(run.seed, run.round.index, k)]
        self.judge.start_clients(absent)
        clients = run.algorithm.clients
        for client in absent[run.fabric.global_rank :: run.fabric.world_size]:
            with clients.stage(client):
                received = run.algorithm.broadcast(client)
                self.transfer(client, "down", run.algorithm.download_sizes(client, received))
            clients.discard(client)
        return [client for client in cohort if client not in absent]

    def accepted_moments(self, moments: Mapping[int, LayerMoments]) -> LayerMoments:
        """See :meth:`Federation.accepted_moments`."""
        return self.judge.rules.moments(moments)

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`Federation.validation_batches`."""
        return iter(self.run.datamodule.evaluation_batches("validate", self.run.settings.dtype))

    def train_server(self) -> None:
        """See :meth:`Federation.train_server`."""
        run = self.run
        algorithm = run.algorithm
        optimizer = run.server_optimizer
        load_state(algorithm, algorithm.server.model())
        run.hooks.call("on_server_phase_start")
        # A second server phase in a round uses the random numbers of the next round, not those of
        # the first phase again.
        data = run.datamodule.local_data(
            sampling.SERVER, run.round.index + self._server_phases, run.settings.dtype
        )
        self._server_phases += 1
        work = algorithm.on_server_start(data).limited(run.settings.max_steps)
        if run.fabric.is_global_zero:  # every rank takes the same steps
            run.scalars.count({"server/steps": float(work.num_steps)})
        if work.num_steps:
            if not algorithm.keep_server_optimizer:
                load_optimizer_state(optimizer, {})
            with own_random_stream(data):
                sequential.Loop(algorithm, optimizer, run.fabric).train(
                    work, "server_training_step", "server/loss",
                    run.hooks.after_steps("on_server_batch_end"),
                )  # fmt: skip
            self._take_working_module()
        run.hooks.call("on_server_phase_end")

    def _take_working_module(self, which: Callable[[str], bool] = lambda name: True) -> None:
        """Copy the weights and buffers of the working module, or some of them, to the global model.

        Args:
            which: Whether a tensor of this name is copied.
        """
        server = self.run.algorithm.server
        tensors = tensors_of(self.run.algorithm)
        trained = {name: t.detach() for name, t in tensors.items() if which(name)}
        server.update(select(trained, server.all_tensors()))


class SimulatedFederation(RunFederation):
    """The clients of a run in one process, or in its ranks.

    It is also the observer of the local trainers: it counts what they report and calls the hooks of
    the callbacks.

    Args:
        run: The run.
    """

    simulated = True

    def reachable(self, clients: Sequence[int]) -> Sequence[int]:
        """All of them: a simulation reaches every client."""
        return clients

    def moments(
        self, parties: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, LayerMoments]]:
        """See :meth:`Federation.moments`."""
        for party in parties:
            yield party, measure_moments(self.run.algorithm, self.run.local_data(party), batch_size)

    def train_clients(self) -> Iterator[ClientUpdate]:
        """See :meth:`Federation.train_clients`."""
        run = self.run
        stacks = self._share(self.start_clients())
        phase = ClientPhase(
            run.algorithm,
            run.client_optimizer,
            run.fabric,
            self,
            run.settings.max_steps,
            batch_ended=run.hooks.after_steps("on_client_batch_end"),
        )
        return self.judge.accepted(run.local_training.train_clients(phase, stacks))

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """See :meth:`Federation.train_jointly`."""
        run = self.run
        algorithm = run.algorithm
        if not isinstance(algorithm, JointAlgorithm):
            raise TypeError(
                f"{type(algorithm).__name__} must be a JointAlgorithm to train clients and server "
                "together"
            )
        stacks = self._share(self.start_clients())
        load_state(algorithm, algorithm.server.model())
        if not algorithm.keep_server_optimizer:
            load_optimizer_state(run.server_optimizer, {})
        phase = JointPhase(
            algorithm=algorithm,
            optimizer=run.client_optimizer,
            fabric=run.fabric,
            observer=self,
            max_steps=run.settings.max_steps,
            batch_ended=run.hooks.after_steps("on_client_batch_end"),
            server_optimizer=run.server_optimizer,
            server_data=self.run.local_data(sampling.SERVER),
            cohort=run.round.cohort,
        )
        updates = run.local_training.train_jointly(phase, stacks)
        self._take_working_module(lambda name: not algorithm.at_clients(name))
        return self.judge.accepted(iter(updates))

    def _share(self, present: list[int]) -> list[list[LocalData]]:
        """The data of the clients that this rank trains, in stacks."""
        run = self.run
        self._step_work: dict[Any, float] = {}
        data = {client: run.local_data(client) for client in present}
        numbers = [self._client_sizes[client] for client in present]
        auto = cpu_stack_size(run.algorithm, data[present[0]], numbers) if present else 1
        stacks = run.local_training.stacks(present, run.fabric.device, auto)
        shares = sampling.share_out(stacks, self._client_sizes, run.fabric.world_size)
        return [
            [self.judge.on_data(data[client]) for client in stack]
            for stack in shares[run.fabric.global_rank]
        ]

    # What the local trainers report.

    def client_started(
        self, data: LocalData, work: LocalWork, sizes: Sizes, received: State
    ) -> None:
        """A client has received its broadcast, of these bytes by name, and prepared its work."""
        run = self.run
        client = data.party
        if run.datamodule.label_location == "server":  # which trains what clients start with
            new = not run.algorithm.clients.get(client, "personal")
            sizes = sizes | (sizes_of(run.algorithm.server.personal) if new else {})
        self.transfer(client, "down", sizes)
        self.judge.started(client, received)
        self.takes_steps |= work.num_steps > 0 and work.train is None
        if work.num_steps and run.settings.system is not None:
            run.step_work[client] = step_work(
                run.algorithm, data, work, run.fabric, self._step_work
            )
        run.scalars.count(
            {
                "client/trained": float(work.num_steps > 0),
                "client/images": float(work.num_samples if work.num_steps else 0),
                "client/steps": float(work.num_steps),
            }
        )
        run.hooks.call("on_client_start", data, work)
        if not work.num_steps:
            self.judge.skipped(client)

    def images_labeled(self, indices: Tensor, pseudo: PseudoLabels) -> None:
        """Images of a client received pseudo-labels at a step.

        ``indices`` are their numbers in the training data.
        """
        self.run.hooks.call("on_pseudo_labels", indices, pseudo)

    def client_ended(self, update: ClientUpdate) -> None:
        """A client has finished."""
        self.transfer(update.client, "up", self.judge.upload_sizes(update))
        self.run.hooks.call("on_client_end", update)

    def client_judged(self, client: int, reason: str | None) -> None:
        """A client is excluded from the round for this reason, and sends no update."""
        self.judge.settle(client, reason)
