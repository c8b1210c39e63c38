"""Stacked clients on a CUDA device, whose steps are recorded once for the run.

Weights, buffers and momenta have a row for each client of a stack. They stay in the same memory for
the run, so recorded steps stay valid from round to round. Clients are independent: only the order
of a client's own batches matters. So there are two recorded functions, each with tensors of fixed
shapes: a step of all rows, for batches of the usual shape, and a step of a single row, for which a
client's tensors are copied in and out, for batches of other shapes, such as the last of an epoch.
A row without a client, or whose client has finished, computes what nobody reads.

What cannot be recorded trains in :class:`~lightning_fedssl.local_training.vectorized.Stack`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import clone_state, exclude, select
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.optimizer_states import like, optimizer_state
from lightning_fedssl.functional.optimizers import weights_of
from lightning_fedssl.functional.recorded import Recorded, Values
from lightning_fedssl.functional.stacking import shapes_of, stack_states
from lightning_fedssl.local_training.ready import Client, Ended, Logged, add_logged
from lightning_fedssl.local_training.sequential import ClientPhase, may_record
from lightning_fedssl.local_training.stacked_step import StackedStep
from lightning_fedssl.state import Batch

KIND = "cuda"
"""The kind of device on which steps are recorded."""


class StackMemory:
    """The rows of a run's stacked clients.

    Attributes:
        rows: Those of all clients of a stack; None before the first.
        one: A single row.
    """

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.one: Rows | None = None

    def stack(
        self, phase: ClientPhase, clients: Sequence[Client], size: int
    ) -> QueuedClients | None:
        """The clients in the rows of this memory; None if their steps are not recorded.

        Args:
            phase: What they are trained with.
            clients: The clients that train.
            size: The number of clients of this stack, those that skip the round included.
        """
        kind = clients[0].data.images.device.type
        fused = all(group.get("fused") for group in phase.optimizer.param_groups)
        if kind != KIND or not (fused and may_record(phase.algorithm, phase.optimizer)):
            return None
        if self.rows is None or self.one is None or self.rows.size < size:
            self.rows = Rows(phase, clients[0].received, size)
            self.one = Rows(phase, clients[0].received, 1)
        if not (self.rows.recorded.records and self.one.recorded.records):
            return None
        return QueuedClients(phase, clients, self.rows, self.one)


class Rows:
    """Tensors of stacked clients that do not move, and the recorded step that changes them.

    Args:
        phase: What they are trained with; the optimizer is fused SGD without dampening.
        received: The weights and buffers of one client, for the shapes.
        size: The number of rows.
    """

    def __init__(self, phase: ClientPhase, received: State, size: int) -> None:
        algorithm = phase.algorithm
        self.size = size
        self.tensors = stack_states([received] * size)
        leaves = {name: self.tensors[name].requires_grad_() for name in trained_weights(algorithm)}
        names = {id(p): name for name, p in algorithm.named_parameters()}
        self.template = phase.optimizer
        order = [self.tensors[names[id(p)]] for p in weights_of(phase.optimizer)]
        self.optimizer = like(phase.optimizer, order, {})
        self.momenta = optimizer_state(self.optimizer)
        for group in self.optimizer.param_groups:
            # Recorded steps read it at every replay; the kernel knows no rates of 64 bits.
            if order[0].dtype == torch.float32:
                group["lr"] = torch.zeros((), device=order[0].device)
        self.variates = {name: torch.zeros_like(p) for name, p in leaves.items()}
        rest = exclude(self.tensors, leaves)
        self.step = StackedStep(phase, leaves, rest, self.optimizer, [])
        self.recorded = Recorded(self._together, f"{type(algorithm).__name__}.training_step")
        variates = {_variate(name): t for name, t in self.variates.items()}
        everything = {**self.tensors, **self.momenta, **variates}
        self.of = [{name: t.detach()[row] for name, t in everything.items()} for row in range(size)]

    def begin(self, algorithm: FederatedAlgorithm, corrected: list[str]) -> None:
        """Set what differs between rounds.

        Args:
            algorithm: The working module.
            corrected: The names of the weights with a control variate.
        """
        self.step.corrected = [(self.step.leaves[name], self.variates[name]) for name in corrected]
        rates = []
        for group, other in zip(
            self.optimizer.param_groups, self.template.param_groups, strict=True
        ):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(other["lr"])
            else:
                group["lr"] = other["lr"]
                rates.append(other["lr"])
        same = vars(type(algorithm)).get("same_step_every_round")
        of_round = None if same else algorithm.current_round.index
        self.recorded.keep_while((of_round, rates, corrected))

    def load(self, row: int, tensors: State) -> None:
        """Give a row its tensors by name; those that are missing are 0."""
        tensors_of_row = self.of[row]
        torch._foreach_zero_([*tensors_of_row.values()])
        for name, t in select(tensors, tensors_of_row).items():
            tensors_of_row[name].copy_(t, non_blocking=True)

    def _together(self, batch: Batch, number: int | Tensor) -> Values:
        """A step of all rows."""
        return self.step([(list(range(self.size)), batch)], number)[0]


@dataclass(eq=False)
class QueuedClients:
    """Clients that train by themselves, each with a queue of batches, and their losses.

    Attributes:
        phase: What they are trained with.
        clients: The clients.
        rows: A row for each of them, or more.
        one: A single row.
        logged: What the steps have logged.
        at: The step that each client makes next.
        ended: The tensors of the clients that have finished, by their row.
    """

    phase: ClientPhase
    clients: Sequence[Client]
    rows: Rows
    one: Rows
    logged: Logged = field(default_factory=lambda: defaultdict(list))
    at: list[int] = field(default_factory=list)
    ended: dict[int, Ended] = field(default_factory=dict)

    def train(self) -> None:
        """Train every client for its own number of steps."""
        self.phase.algorithm.train()
        self.at = [0] * self.rows.size
        corrected = sorted(set().union(*(c.work.control_variate for c in self.clients)))
        for rows in (self.rows, self.one):
            rows.begin(self.phase.algorithm, corrected)
        for row, client in enumerate(self.clients):
            momenta = self.phase.kept_optimizer_state(client.data.party)
            variate = {_variate(name): t for name, t in client.work.control_variate.items()}
            self.rows.load(row, {**client.received, **momenta, **variate})
        first = [client.work.batch(0) for client in self.clients]
        filler = max(first, key=lambda batch: sum(t.numel() for t in batch.values()))
        usual = shapes_of(filler)
        batches = [filler] * self.rows.size
        while len(self.ended) < len(self.clients):
            live = []
            for row, client in enumerate(self.clients):
                while row not in self.ended:
                    batch = client.work.batch(self.at[row])
                    if shapes_of(batch) == usual:
                        batches[row] = batch
                        live.append(row)
                        break
                    self._step_alone(row, batch)
            if live:
                self._step_together(batches, live)

    def _step_together(self, batches: list[Batch], live: list[int]) -> None:
        """A step of all rows.

        Args:
            batches: Those of all rows.
            live: The rows whose clients make it.
        """
        values = self.rows.recorded(stack_states(batches), _numbers(self.at, batches))
        if len(live) < self.rows.size:
            index = _numbers(live, batches)
            values = [(t[index], name, weight) for t, name, weight in values]
        add_logged(self.logged, values, live)
        for row in live:
            self._stepped(row)

    def _step_alone(self, row: int, batch: Batch) -> None:
        """A step of one client in the single row."""
        alone, row_of_all = [*self.one.of[0].values()], [*self.rows.of[row].values()]
        torch._foreach_copy_(alone, row_of_all)
        values = self.one.recorded(stack_states([batch]), _numbers([self.at[row]], [batch]))
        torch._foreach_copy_(row_of_all, alone)
        add_logged(self.logged, values, [row])
        self._stepped(row)

    def _stepped(self, row: int) -> None:
        """A client has made a step. After its last one its tensors are copied, because further
        steps of all rows change them.
        """
        self.at[row] += 1
        if self.at[row] == self.clients[row].work.num_steps:
            result = clone_state(self.rows.of[row])
            self.ended[row] = select(result, self.rows.tensors), select(result, self.rows.momenta)


def _numbers(numbers: list[int], batches: list[Batch]) -> Tensor:
    """Numbers on the device of batches."""
    device = next(iter(batches[0].values())).device
    return torch.tensor(numbers).to(device, non_blocking=True)


def _variate(name: str) -> str:
    return f"control variate of {name}"
