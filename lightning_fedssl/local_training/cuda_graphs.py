"""Steps of stacked clients over static buffers, recorded once as a CUDA graph and then replayed.

A replayed graph repeats the recorded kernels on the same memory addresses, at 2-3 microseconds per kernel and without
Python. So weights, optimizer states, model buffers, batches, learning rates and the step number have fixed addresses
for the whole run, and every step copies its batch there. ``training_step`` receives the step number as a tensor,
because a Python number would be recorded with its first value. Only a few widths (numbers of clients per step) are
used: unused rows of a step compute values that are not read, and their contents are saved and restored. Without a CUDA
device the same steps run without recording, so that everything but the recording is tested on a CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.keyed_dropout import key_of
from lightning_fedssl.local_training.ops.loss_check import LossError
from lightning_fedssl.local_training.ops.stacked_optimizer import like
from lightning_fedssl.local_training.sequential import LocalTrainingObserver, add_to_gradients
from lightning_fedssl.local_training.vectorized import Client, Stack, clip_gradients, in_order, of_one_shape
from lightning_fedssl.state import Batch, optimizer_state, set_learning_rate

_log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
"""The possible numbers of clients in a step: few, because each needs a graph, and close, to waste little work."""

TOLERANCE = 0.02
"""Largest relative difference between repetitions of a CUDA step; kernels without a fixed order stay below 0.001."""

CHAIN = 3
"""The number of successive steps for which replayed and executed steps are compared."""

NOISE = 1e-5
"""The same relative to the largest change of any weight, for weights that change by rounding errors alone."""

Shape = tuple[tuple[str, torch.Size], ...]
Step = tuple[Callable[[], object], list[tuple[str, float]]]
"""A function that makes a step, and the scalars that it logs, with the weight of one client."""

StepKey = tuple[int, Shape, bool]
"""Width and shape of a step's batches, and whether gradients are corrected."""


class FixedMemoryError(Exception):
    """A method's steps cannot run over static buffers; the text is the reason. Nothing has been trained."""


class FixedMemory:
    """Trains stacks of clients over static buffers that are reused in every round, if possible.

    Args:
        clients: The largest number of clients in a stack.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.stack: FixedStack | None = None
        self.refused = False

    def __call__(
        self,
        algorithm: FederatedAlgorithm,
        clients: Sequence[Client],
        kept: Sequence[State],
        optimizer: Optimizer,
        fabric: Fabric,
        observer: LocalTrainingObserver,
    ) -> Stack | None:
        """Train clients in order of falling numbers of steps; None, without training, if static buffers do not fit.

        Args:
            algorithm: For its loss.
            clients: The clients.
            kept: The optimizer state of each; empty for a new state.
            optimizer: Gives the settings.
            fabric: For the precision and the backward pass.
            observer: Is called at every step.

        Raises:
            torch.OutOfMemoryError: The buffers are freed, and later stacks have half the clients.
        """
        if self.refused:
            return None
        try:
            if self.stack is None:
                self.stack = FixedStack(algorithm, clients[0].received, optimizer, fabric, self.clients)
            if not self.stack.load(clients, kept):
                return None
            self.stack.train_all(clients, observer)
        except FixedMemoryError as reason:
            self.refused, self.stack = True, None
            _log.warning("trainer.cuda_graphs: steps of %s run without graphs: %s", type(algorithm).__name__, reason)
        except torch.OutOfMemoryError:
            self.clients, self.stack = -(-len(clients) // 2), None  # rounded up, as the stack is halved
            raise
        return self.stack


class FixedStack(Stack):
    """A stack whose tensors keep their addresses.

    Args:
        algorithm: For its loss.
        received: Weights and buffers of one client, for their names and shapes.
        template: The clients' optimizer.
        fabric: For the precision and the backward pass.
        clients: Rows.

    Raises:
        FixedMemoryError: If the optimizer reads its learning rate on the host, or starts from something but zeros.
    """

    def __init__(
        self, algorithm: FederatedAlgorithm, received: State, template: Optimizer, fabric: Fabric, clients: int
    ) -> None:
        _check(template)
        super().__init__(algorithm, [received] * clients, [0] * clients)
        self.template, self.fabric, self.clients = template, fabric, clients
        self.device = self.keys.device
        self.recorder = Recorder(self.device)
        self.order = in_order(template, algorithm)
        self.state = self._zero_state()
        self.done = 0.0
        self.made: list[int] = []
        rate_type = torch.float32 if self.device.type == "cuda" else torch.float64  # CUDA kernels read 32 bits
        self.rates = [torch.zeros((), dtype=rate_type, device=self.device) for _ in template.param_groups]
        self.step_number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.control_variates: State = {}
        self._correction_room: State = {}
        stacked = [self.keys, *(t.detach() for t in (*self.tensors.values(), *self.state.values()) if t.dim())]
        self.rows = [[t[row] for t in stacked] for row in range(clients)]
        saved = [torch.empty_like(t) for t in stacked]  # at once, so that the memory of a stack is known early
        self._saved = [[t[row] for t in saved] for row in range(clients)]
        self._batches: dict[Shape, Batch] = {}
        self._widths: dict[int, tuple[State, State, Optimizer]] = {}
        self._steps: dict[StepKey, Step] = {}
        self._numbers: dict[str, str] = {}
        self._unconfirmed: set[StepKey] = set()
        self._confirmed: set[StepKey] = set()
        self._logged: list[tuple[str, float]] = []
        self._unreached: set[str] | None = None

    # A round.

    def load(self, clients: Sequence[Client], kept: Sequence[State]) -> bool:
        """Copy the clients' initial tensors; False if their step counts differ, which one optimizer cannot have."""
        counts = {float(state.get(name, 0.0)) for name, t in self.state.items() if not t.dim() for state in kept}
        if len(counts) > 1:
            return False
        self.done = counts.pop() if counts else 0.0
        for row, (client, state) in enumerate(zip(clients, kept, strict=True)):
            torch._foreach_zero_(self.rows[row])
            start = {**client.received, **{name: t for name, t in state.items() if self.state[name].dim()}}
            torch._foreach_copy_([self._stacked(name)[row] for name in start], list(start.values()), non_blocking=True)
        keys = [key_of(client.data) for client in clients]
        self.keys[: len(clients)].copy_(torch.tensor(keys), non_blocking=True)
        self.made = [client.work.num_steps for client in clients]
        self._set_correction(clients)
        self._note_numbers()
        return True

    def _note_numbers(self) -> None:
        """Compare recorded steps again in a later round, and whenever a number of the module has changed."""
        numbers = _numbers_of(self.algorithm)
        if numbers != self._numbers:
            self._confirmed.clear()
        self._numbers, self._unconfirmed = numbers, set(self._steps) - self._confirmed

    def train_all(self, clients: Sequence[Client], observer: LocalTrainingObserver) -> None:
        """Train every client for its own number of steps; see :meth:`Stack.train`.

        Raises:
            FixedMemoryError: If a step depends on more than its buffers.
        """
        self.algorithm.train()
        self.weights = {name: [0.0] * self.clients for name in self.sums}
        finished: set[int] = set()
        for step in range(clients[0].work.num_steps):
            batches = [client.work.batch(step) for client in clients if client.work.num_steps > step]
            self._set_rates(step)
            self._save(set(range(len(batches), len(clients))) - finished)
            finished.update(range(len(batches), len(clients)))
            for rows in of_one_shape(batches):
                self._step_of(rows, batches, step)
            for _ in batches:
                observer.client_batch_ended(step)
        self._restore(finished)

    def state_of(self, row: int) -> State:
        """A client's optimizer state as :func:`lightning_fedssl.state.optimizer_state` gives it."""
        steps = self.done + self.made[row]
        return {name: t[row] if t.dim() else torch.full_like(t, steps) for name, t in self.state.items()}

    def _step_of(self, rows: Sequence[int], batches: Sequence[Batch], step: int) -> None:
        """One step of the clients in these rows, in ascending order, whose batches have one shape.

        They are moved to the first rows, on which recorded steps work, and back.
        """
        width = min(min((w for w in WIDTHS if w >= len(rows)), default=self.clients), self.clients)
        others = set(range(min(width, len(batches)))) - set(rows)
        self._save(others)
        moves = [(slot, row) for slot, row in enumerate(rows) if slot != row]
        for slot, row in moves:  # ascending order: a row is read before it is overwritten
            self._copy_row(row, slot)
        self._step(width, rows, [batches[row] for row in rows], step)
        for slot, row in reversed(moves):
            self._copy_row(slot, row)
        self._restore(others)

    def _step(self, width: int, rows: Sequence[int], batches: Sequence[Batch], step: int) -> None:
        """One step of the first ``width`` rows, of which the first ones have a batch: those of the clients ``rows``."""
        memory = self._load_batches(width, batches)
        # A recorded step reads memory alone, so the step's number and the optimizer's step counts are tensors.
        self.step_number.fill_(step)
        if counters := [t for t in self.state.values() if not t.dim()]:
            torch._foreach_zero_(counters)
            torch._foreach_add_(counters, self.done + step)
        key = (width, _shape(batches[0]), bool(self.control_variates))
        if key not in self._steps:
            self._steps[key] = self._prepared(width, memory)
        elif key in self._unconfirmed:  # a number of an earlier round may have been recorded as a constant
            self._confirm(key, memory)
        run, logged = self._steps[key]
        run()
        for name, weight in logged:
            of_clients = self.weights.setdefault(name, [0.0] * self.clients)
            for row in rows:
                of_clients[row] += weight

    def _load_batches(self, width: int, batches: Sequence[Batch]) -> Batch:
        """Copy the batches to their static buffers, ``(width, batch, ...)``; unused rows get the first batch."""
        first, shape = batches[0], _shape(batches[0])
        if shape not in self._batches:
            self._batches[shape] = {name: t.new_empty((self.clients, *t.shape)) for name, t in first.items()}
        place = {name: room[:width] for name, room in self._batches[shape].items()}
        padded = [*batches, *[first] * (width - len(batches))]
        for name, room in place.items():
            torch.stack([batch[name] for batch in padded], out=room)
        return place

    # One step.

    def _body(self, width: int, batch: Batch, logged: list[tuple[str, float]]) -> None:
        """The recorded function: a step of the first rows on the buffers' values; stores the scalars that it logs."""
        self.leaves, self.rest, optimizer = self._part(width)
        logged.clear()
        self._logged = logged
        self.zero_grad()
        with self.fabric.autocast():
            losses, replaced = self._losses(
                self.leaves, self.rest, batch, self.step_number, self.keys[:width], range(width)
            )
        for name, new in replaced.items():
            self.rest[name].copy_(new)
        self._log("client/loss", losses, next(iter(batch.values())).shape[1], range(width))
        self.fabric.backward(losses.sum())
        if self.algorithm.gradient_clip_norm is not None:
            clip_gradients(self.leaves.values(), self.algorithm.gradient_clip_norm)
        add_to_gradients([(self.leaves[name], values[:width]) for name, values in self.control_variates.items()])
        self._check_counts()
        optimizer.step()
        self.zero_grad()  # gradients that remain after a recording would occupy memory for every graph

    def _check_counts(self) -> None:
        """Refuse a weight that some steps reach and others do not: it has made fewer steps than the buffers count."""
        unreached = {name for name, leaf in self.leaves.items() if leaf.grad is None}
        counts = any(not t.dim() for t in self.state.values())
        if counts and self._unreached not in (None, unreached):
            raise FixedMemoryError(
                "some weights get a gradient in a part of the steps only, so that step counts differ"
            )
        self._unreached = unreached

    def _log(self, name: str, values: Tensor, weight: float, rows: Sequence[int]) -> None:
        """Add the values of the first rows to their sums on the device, which move with the rest of a row."""
        self._logged.append((name, weight))
        if name not in self.sums:
            self.sums[name] = torch.zeros(self.clients, dtype=torch.float64, device=self.device)
            self._add_to_rows(self.sums[name])
        if values.device != self.device:  # a number of the host's, the same for all
            values = torch.full((len(rows),), float(values[0]), dtype=torch.float64, device=self.device)
        self.sums[name][: len(rows)].add_(values.detach().double(), alpha=weight)

    def _prepared(self, width: int, batch: Batch) -> Step:
        """A step of a width and shape, recorded if the device supports it."""
        logged: list[tuple[str, float]] = []
        body = partial(self._body, width, batch, logged)
        if self.recorder.works:
            with self._undone(width, batch):
                replay = self.recorder(body)
            if replay is not None:
                if self._same(width, batch, replay, body):
                    return replay, logged
                self.recorder.give_up("replayed steps differ from executed steps")
        return body, logged

    def _confirm(self, key: StepKey, batch: Batch) -> None:
        """Compare a recorded step with an executed one."""
        self._unconfirmed.discard(key)
        self._confirmed.add(key)
        run, _ = self._steps[key]
        body = partial(self._body, key[0], batch, [])
        if self.recorder.works and not self._same(key[0], batch, run, body, steps=1):
            raise FixedMemoryError("training_step gives another result in a later round than the one recorded")

    def _same(
        self, width: int, batch: Batch, replay: Callable[[], object], body: Callable[[], object], steps: int = CHAIN
    ) -> bool:
        """Whether successive steps give the same values replayed and executed; the steps are undone.

        One step is not enough to find a number that was recorded with its first value. An example is the decay of Mean
        Teacher: at the first step the teacher equals the student, so every decay gives the same result.
        """
        outcomes: list[State] = []
        with self._undone(width, batch) as before:
            for run in (body, replay):
                for _ in range(steps):
                    run()
                    self.step_number.add_(1)
                outcomes.append({name: t.clone() for name, t in self._written(width).items()})
                self._put_back(width, batch, before)
                self.step_number.sub_(steps)
        return _alike(before, outcomes[0], outcomes[1], exact=self.device.type != "cuda")

    @contextmanager
    def _undone(self, width: int, batch: Batch) -> Iterator[State]:
        before = {name: t.clone() for name, t in (self._written(width) | _named_batch(batch)).items()}
        yield before
        self._put_back(width, batch, before)

    def _put_back(self, width: int, batch: Batch, before: State) -> None:
        for name, t in (self._written(width) | _named_batch(batch)).items():
            t.copy_(before[name]) if name in before else t.zero_()

    def _written(self, width: int) -> State:
        """All tensors that a step of a width may write, except those of its batch, by name."""
        parts = {"model": self.tensors, "optimizer": self.state, "sum": self.sums}
        return {
            f"{part}.{name}": t.detach()[:width] if t.dim() else t
            for part, tensors in parts.items()
            for name, t in tensors.items()
        }

    # Memory.

    def _part(self, width: int) -> tuple[State, State, Optimizer]:
        """The first rows: weights, buffers, and an optimizer over them."""
        if width not in self._widths:
            self.narrow(width)
            optimizer = like(self.template, [self.leaves[name] for name in self.order])
            vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True  # it also makes steps before the recording
            for rate, group in zip(self.rates, optimizer.param_groups, strict=True):
                group["lr"], group["capturable"] = rate, self.device.type == "cuda"
            for key, t in self.state.items():
                number, _, name = key.partition(".")
                optimizer.state[self.leaves[self.order[int(number)]]][name] = t[:width] if t.dim() else t
            self._widths[width] = self.leaves, self.rest, optimizer
        return self._widths[width]

    def _zero_state(self) -> State:
        """The optimizer's state before the first step: the tensors that a step creates, set to zero."""
        trial = like(self.template, [self.tensors[name].detach().clone().requires_grad_() for name in self.order])
        for weight in (p for group in trial.param_groups for p in group["params"]):
            weight.grad = torch.zeros_like(weight)
        trial.step()
        return {name: torch.zeros_like(t) for name, t in optimizer_state(trial).items()}

    def _stacked(self, name: str) -> Tensor:
        """The stacked tensor that contains a client's weight, buffer or optimizer state as a row."""
        return (self.tensors[name] if name in self.tensors else self.state[name]).detach()

    def _set_rates(self, step: int) -> None:
        if self.algorithm.step_factors:
            set_learning_rate(self.template, self.algorithm.step_factors[step])
        if step == 0 or self.algorithm.step_factors:
            for rate, group in zip(self.rates, self.template.param_groups, strict=True):
                rate.fill_(group["lr"])

    def _set_correction(self, clients: Sequence[Client]) -> None:
        wanted = any(client.work.control_variate for client in clients)
        self.control_variates = self.room_for_control_variates() if wanted else {}
        for name, room in self.control_variates.items():
            room.zero_()
            for row, client in enumerate(clients):
                if name in client.work.control_variate:
                    room[row].copy_(client.work.control_variate[name])

    def room_for_control_variates(self) -> State:
        """One for every weight, kept from the first time on: a recorded step reads where it was."""
        if not self._correction_room:
            self._correction_room = {name: torch.zeros_like(self._stacked(name)) for name in self.order}
            for room in self._correction_room.values():
                self._add_to_rows(room)
        return self._correction_room

    def _add_to_rows(self, stacked: Tensor) -> None:
        """Register a tensor ``(clients, ...)`` whose rows are moved together with the other tensors of a client."""
        for row in range(self.clients):
            self.rows[row].append(stacked[row])
            self._saved[row].append(torch.zeros_like(stacked[row]))

    def _save(self, rows: Iterable[int]) -> None:
        for row in rows:
            torch._foreach_copy_(self._saved[row], self.rows[row])

    def _restore(self, rows: Iterable[int]) -> None:
        for row in rows:
            torch._foreach_copy_(self.rows[row], self._saved[row])

    def _copy_row(self, source: int, target: int) -> None:
        torch._foreach_copy_(self.rows[target], self.rows[source])


def _numbers_of(algorithm: FederatedAlgorithm) -> dict[str, str]:
    """The numbers and strings in the modules' attributes, whose values a recorded step contains as constants."""
    return {
        f"{path}.{name}": repr(value)
        for path, module in algorithm.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name != "training"
    }


def _alike(before: State, expected: State, found: State, exact: bool) -> bool:
    """Whether steps wrote the same values, computed with one copy from the device.

    Args:
        before: The values before the steps; zero where a name is missing.
        expected: The values that the steps should have written.
        found: The values that they wrote.
        exact: Allow no difference. If false, a small difference is allowed, for kernels without a fixed order of
            additions.
    """
    names = [name for name, t in expected.items() if t.numel()]
    differences = torch.stack([_largest(_difference(found[name], expected[name])) for name in names])
    if exact:
        return not bool(differences.any())
    changes = torch.stack([_largest(expected[name] - before.get(name, 0.0)) for name in names])
    parts = [name.partition(".")[0] for name in names]
    of_part = {part: changes[[i for i, other in enumerate(parts) if other == part]].max() for part in set(parts)}
    allowed = TOLERANCE * changes + NOISE * torch.stack([of_part[part] for part in parts])
    return bool((differences <= allowed).all())


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """The absolute difference, 0 where both are the same or no number, infinite where one of them is no number."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a.double() - b.double()).abs()).nan_to_num(math.inf)


def _largest(change: Tensor) -> Tensor:
    return change.double().abs().nan_to_num(0.0).max()


def _named_batch(batch: Batch) -> State:
    """The tensors of a batch, which a loss may change in place."""
    return {f"batch.{name}": t for name, t in batch.items()}


def _shape(batch: Batch) -> Shape:
    return tuple((name, t.shape) for name, t in batch.items())


def _check(template: Optimizer) -> None:
    name = type(template).__name__
    if type(template) not in (SGD, Adam, AdamW) or not all(group.get("fused") for group in template.param_groups):
        raise FixedMemoryError(f"only fused SGD, Adam and AdamW are supported, and the optimizer is {name}")
    if any(group.get("dampening") for group in template.param_groups):
        raise FixedMemoryError("the first step of SGD with dampening differs from later steps")


class Recorder:
    """Records CUDA graphs of steps, until a recording has failed once in the process.

    Graphs share a memory pool: tensors that another graph could overwrite are not read after a replay.

    Args:
        device: The device of the steps; only a CUDA device records graphs.
    """

    broken = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.works = device.type == "cuda" and not Recorder.broken
        self._pool = torch.cuda.graph_pool_handle() if self.works else None
        self._side = torch.cuda.Stream(device) if self.works else None

    def __call__(self, step: Callable[[], None]) -> Callable[[], object] | None:
        """A function that replays a step; None, with one warning, if the step cannot be recorded.

        Raises:
            torch.OutOfMemoryError: The device has no memory left; a smaller stack may be recorded.
            FixedMemoryError: The step refuses static buffers.
            LossError: The step returns no loss.
        """
        try:
            return self.record(step)
        except (torch.OutOfMemoryError, FixedMemoryError, LossError):
            raise
        except Exception as error:
            Recorder.broken = True
            self.give_up(str(error).partition("\n")[0])
            return None

    def give_up(self, reason: str) -> None:
        """Stop recording, and log the reason once."""
        if self.works:
            self.works = False
            _log.warning("trainer.cuda_graphs: steps are not replayed as a graph: %s", reason)

    def record(self, step: Callable[[], None]) -> Callable[[], object]:
        """A graph of a step, recorded after some steps on the same side stream, which PyTorch requires.

        The last of these steps raises an error if the host waits for the device. A failed recording would leave older
        versions of PyTorch with a broken allocator and current stream (pytorch issue 180395).
        """
        assert self._side is not None
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(here):  # restores it in any case
            self._side.wait_stream(here)
            try:
                with torch.cuda.stream(self._side):
                    step()
                    step()
                    with _host_may_not_wait():
                        step()
            finally:  # the steps must be finished before they are undone
                here.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                step()
        return graph.replay


@contextmanager
def _host_may_not_wait() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
