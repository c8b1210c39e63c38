"""Steps of stacked clients over fixed memory, which a CUDA device records once as a graph and replays.

A replayed graph does on the same addresses what was recorded, at 2-3 microseconds a kernel and without Python. So
weights, optimizer states, buffers, batches and learning rates have one place for the whole run, and every step copies
its batch there. Steps keep to a few widths: rows beyond the clients that train, and rows whose client has a batch of
another size just then, compute something that nobody reads; what such a row holds is put aside and put back. Where
nothing can be recorded the same steps run as they are, so that all but the recording is tested without a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.local_training.ops.keyed_dropout import key_of
from lightning_fedssl.local_training.ops.stacked_optimizer import like
from lightning_fedssl.local_training.sequential import LocalTrainingObserver, add_to_gradients
from lightning_fedssl.local_training.vectorized import Client, Stack, clip_gradients, in_order
from lightning_fedssl.state import Batch, optimizer_state, set_learning_rate

_log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
"""Clients of a step: few enough to record a graph for each, close enough to waste little."""

TOLERANCE = 0.02
"""Of a CUDA step's change, how much a repetition may differ; kernels that add in no fixed order come below 0.001."""

NOISE = 1e-5
"""The same of the largest change of any weight: one whose true gradient is 0 moves by rounding alone."""

Shape = tuple[tuple[str, torch.Size], ...]
Step = tuple[Callable[[], object], list[tuple[str, float]]]
"""Makes a step; and the scalars that it logs, with the weight of one client."""

StepKey = tuple[int, Shape, bool]
"""Width and shape of a step's batches, and whether gradients are corrected."""


class FixedMemoryError(Exception):
    """Why a method's steps cannot run over fixed memory; nothing has been trained."""


class FixedMemory:
    """Trains stacks of clients in memory that is kept from round to round, where that is possible.

    Args:
        clients: Most clients that train together.
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
        """Train clients, longest first; None, and nothing done, if they need memory of their own.

        Args:
            algorithm: Gives the loss.
            clients: The clients.
            kept: The optimizer's state of each; empty for a fresh start.
            optimizer: Gives the settings.
            fabric: Gives precision and the backward pass.
            observer: Told of every step.
        """
        if self.refused:
            return None
        try:
            if self.stack is None:
                self.stack = FixedStack(algorithm, clients[0].received, optimizer, fabric, self.clients)
            if not self.stack.load(clients, kept):
                return None
            self.stack.train_all(clients, observer)
        except (FixedMemoryError, torch.OutOfMemoryError) as reason:
            self.refused, self.stack = True, None
            why = str(reason).partition("\n")[0]
            _log.warning("trainer.cuda_graphs: steps of %s are made one by one: %s", type(algorithm).__name__, why)
        return self.stack


class FixedStack(Stack):
    """A stack that stays where it is.

    Args:
        algorithm: Gives the loss.
        received: Weights and buffers of one client, for their names and shapes.
        template: The clients' optimizer.
        fabric: Gives precision and the backward pass.
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
        self.compared: set[tuple[str, ...]] = set()
        self.order = in_order(template, algorithm)
        self.state = self._zero_state()
        self.done = 0.0
        self.made: list[int] = []
        rate_type = torch.float32 if self.device.type == "cuda" else torch.float64  # CUDA's kernels read 32 bits
        self.rates = [torch.zeros((), dtype=rate_type, device=self.device) for _ in template.param_groups]
        self.step_number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.active = torch.zeros(clients, dtype=torch.bool, device=self.device)
        self.correction: State = {}
        self._correction_room: State = {}
        self.sums: State = {}
        self.weights: Counter[str] = Counter()
        stacked = [t.detach() for t in (*self.tensors.values(), *self.state.values()) if t.dim()]
        self.rows = [[t[row] for t in stacked] for row in range(clients)]
        self._aside: dict[int, list[Tensor]] = {}
        self._alone: FixedStack | None = None
        self._batches: dict[Shape, Batch] = {}
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._widths: dict[int, tuple[State, State, Optimizer]] = {}
        self._steps: dict[StepKey, Step] = {}
        self._unconfirmed: set[StepKey] = set()
        self._confirmed: set[StepKey] = set()
        self._logged: list[tuple[str, float]] = []

    # A round.

    def load(self, clients: Sequence[Client], kept: Sequence[State]) -> bool:
        """Copy in what clients start from; False if their numbers of steps differ, which one optimizer cannot hold."""
        counts = {float(state.get(name, 0.0)) for name, t in self.state.items() if not t.dim() for state in kept}
        if len(counts) > 1:
            return False
        self.done = counts.pop() if counts else 0.0
        for row, (client, state) in enumerate(zip(clients, kept, strict=True)):
            torch._foreach_zero_(self.rows[row])
            start = {**client.received, **{name: t for name, t in state.items() if t.dim()}}
            torch._foreach_copy_([self._stacked(name)[row] for name in start], list(start.values()))
        keys = [key_of(client.data) for client in clients]
        self.keys[: len(clients)].copy_(torch.tensor(keys), non_blocking=True)
        self.made = [client.work.num_steps for client in clients]
        for stack in filter(None, (self, self._alone)):
            stack._unconfirmed = set(stack._steps) - stack._confirmed
        self._set_correction(clients)
        return True

    def train_all(self, clients: Sequence[Client], observer: LocalTrainingObserver) -> None:
        """Train every client for its own number of steps; see :meth:`Stack.train`.

        Raises:
            FixedMemoryError: If a step depends on more than its memory.
        """
        self.algorithm.train()
        self.weights.clear()
        for total in self.sums.values():
            total.zero_()
        finished: set[int] = set()
        for step in range(clients[0].work.num_steps):
            batches = [client.work.batch(step) for client in clients if client.work.num_steps > step]
            self._set_rates(step)
            self._train_step(batches, step, finished, len(clients))
            for _ in batches:
                observer.client_batch_ended(step)
        for row in finished:
            torch._foreach_copy_(self.rows[row], self._aside[row])
        self._report()

    def state_of(self, row: int) -> State:
        """A client's optimizer state as :func:`lightning_fedssl.state.optimizer_state` gives it."""
        steps = self.done + self.made[row]
        return {name: t[row] if t.dim() else torch.full_like(t, steps) for name, t in self.state.items()}

    def _train_step(self, batches: Sequence[Batch], step: int, finished: set[int], clients: int) -> None:
        """One step of every client that has a batch: those of the commonest shape together, the others one by one."""
        shapes = [_shape(batch) for batch in batches]
        common = Counter(shapes).most_common(1)[0][0]
        together = [row for row, shape in enumerate(shapes) if shape == common]
        apart = [row for row, shape in enumerate(shapes) if shape != common]
        width = min(min((w for w in WIDTHS if w > together[-1]), default=self.clients), self.clients)
        for row in apart:
            self._train_alone(row, batches[row], step)
        for row in set(range(len(batches), min(width, clients))) - finished:
            finished.add(row)
            self._put_aside(row, self.rows[row])
        self._step(width, together, batches, step)
        for row in apart:
            torch._foreach_copy_(self.rows[row], self._aside[row])

    def _train_alone(self, row: int, batch: Batch, step: int) -> None:
        """One step of one client in a stack of its own; the result is put aside."""
        alone = self._alone = self._alone or self._one_row()
        alone.done = self.done
        torch._foreach_copy_(alone.rows[0], self.rows[row])
        alone.keys.copy_(self.keys[row : row + 1])
        alone.correction = alone.room_for_corrections() if self.correction else {}
        for name, values in self.correction.items():
            alone.correction[name].copy_(values[row : row + 1])
        alone._step(1, [0], [batch], step)
        self._put_aside(row, alone.rows[0])

    def _step(self, width: int, rows: Sequence[int], batches: Sequence[Batch], step: int) -> None:
        """One step of the first ``width`` rows, of which the named ones have a batch."""
        first, shape = batches[rows[0]], _shape(batches[rows[0]])
        if shape not in self._batches:
            self._batches[shape] = {name: t.new_empty((self.clients, *t.shape)) for name, t in first.items()}
        memory = {name: room[:width] for name, room in self._batches[shape].items()}
        for name, room in memory.items():
            torch.stack([(batches[row] if row in rows else first)[name] for row in range(width)], out=room)
        self.step_number.fill_(step)
        self.active.copy_(self._mask(rows))
        if counters := [t for t in self.state.values() if not t.dim()]:
            torch._foreach_zero_(counters)
            torch._foreach_add_(counters, self.done + step)
        key = (width, shape, bool(self.correction))
        if key not in self._steps:
            self._steps[key] = self._prepared(width, memory)
        elif key in self._unconfirmed:
            self._confirm(key, memory)
        run, logged = self._steps[key]
        run()
        for name, weight in logged:
            self.weights[name] += weight * len(rows)  # type: ignore[assignment]

    # One step.

    def _body(self, width: int, batch: Batch, number: int) -> None:
        """What is recorded: a step of the first rows on what lies in memory."""
        self.leaves, self.rest, optimizer = self._part(width)
        self._logged = []
        self.zero_grad()
        with self.fabric.autocast():
            losses, replaced = self._losses(self.leaves, self.rest, batch, number, self.keys[:width])
        for name, new in replaced.items():
            self.rest[name].copy_(new)
        self._log("client/loss", losses, next(iter(batch.values())).shape[1])
        self.fabric.backward(losses.sum())
        if self.algorithm.gradient_clip_norm is not None:
            clip_gradients(self.leaves.values(), self.algorithm.gradient_clip_norm)
        add_to_gradients([(self.leaves[name], values[:width]) for name, values in self.correction.items()])
        optimizer.step()

    def dropout_step(self, step: int) -> int | Tensor:
        """The step's number in memory."""
        return self.step_number

    def _log(self, name: str, values: Tensor, weight: float) -> None:
        """Add the values of the clients that have a batch to a sum on the device."""
        self._logged.append((name, weight))
        if name not in self.sums:
            self.sums[name] = torch.zeros((), dtype=torch.float64, device=self.device)
        if values.device != self.device:  # a number of the host's, the same for all
            values = torch.full((len(values),), float(values[0]), dtype=torch.float64, device=self.device)
        self.sums[name].add_(torch.where(self.active[: len(values)], values.detach().double(), 0.0).sum(), alpha=weight)

    def _report(self) -> None:
        """Give the means of a round to the algorithm's log."""
        for name, weight in self.weights.items():
            if self.algorithm.collector is not None:
                self.algorithm.collector(name, self.sums[name] / weight, weight)

    def _prepared(self, width: int, batch: Batch) -> Step:
        """A step of a width and shape, recorded where the device can."""
        body = partial(self._body, width, batch, 0)
        expected = self._outcome(body)
        names = tuple(batch)
        if names not in self.compared and not self._alike(
            self._outcome(partial(self._body, width, batch, 999)), expected
        ):
            raise FixedMemoryError("training_step gives another result when it is repeated with another batch_idx")
        self.compared.add(names)
        if self.recorder.works:
            with self._undone():
                replay = self.recorder(body)
            if replay and self._alike(self._outcome(replay), expected):
                return replay, self._logged
            self.recorder.give_up("a replayed step differs from one that is made")
        return body, self._logged

    def _confirm(self, key: StepKey, batch: Batch) -> None:
        """Compare a recorded step with one that is made, once in a later round: a number may have moved meanwhile."""
        self._unconfirmed.discard(key)
        self._confirmed.add(key)
        run, _ = self._steps[key]
        if self.recorder.works and not self._alike(
            self._outcome(run), self._outcome(partial(self._body, key[0], batch, 0))
        ):
            raise FixedMemoryError("training_step gives another result in a later round than the one recorded")

    def _outcome(self, run: Callable[[], object]) -> tuple[State, State]:
        """What a step writes, before it and after it; it is undone."""
        with self._undone() as before:
            run()
            return before, {name: t.clone() for name, t in self._written().items()}

    def _alike(self, a: tuple[State, State], b: tuple[State, State]) -> bool:
        before, expected = b
        scales = {name: _largest(t - before.get(name, torch.zeros_like(t))) for name, t in expected.items()}
        for name, t in expected.items():
            part = name.partition(".")[0]
            of_part = max(scale for other, scale in scales.items() if other.startswith(f"{part}."))
            tolerance = TOLERANCE * scales[name] + NOISE * of_part if self.device.type == "cuda" else 0.0
            if not torch.allclose(a[1][name], t, rtol=0, atol=tolerance, equal_nan=True):
                return False
        return True

    @contextmanager
    def _undone(self) -> Iterator[State]:
        before = {name: t.clone() for name, t in self._written().items()}
        yield before
        for name, t in self._written().items():
            t.copy_(before[name]) if name in before else t.zero_()

    def _written(self) -> State:
        """All that a step may write, by a name."""
        parts = {"model": self.tensors, "optimizer": self.state, "sum": self.sums}
        return {f"{part}.{name}": t.detach() for part, tensors in parts.items() for name, t in tensors.items()}

    # Memory.

    def _part(self, width: int) -> tuple[State, State, Optimizer]:
        """The first rows: weights, buffers, and an optimizer over them."""
        if width not in self._widths:
            self.narrow(width)
            optimizer = like(self.template, [self.leaves[name] for name in self.order])
            vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True  # it also steps before it is recorded
            for rate, group in zip(self.rates, optimizer.param_groups, strict=True):
                group["lr"], group["capturable"] = rate, self.device.type == "cuda"
            for key, t in self.state.items():
                number, _, name = key.partition(".")
                optimizer.state[self.leaves[self.order[int(number)]]][name] = t[:width] if t.dim() else t
            self._widths[width] = self.leaves, self.rest, optimizer
        return self._widths[width]

    def _zero_state(self) -> State:
        """The optimizer's state before the first step: what a step makes, set to zero."""
        trial = like(self.template, [self.tensors[name].detach().clone().requires_grad_() for name in self.order])
        for weight in (p for group in trial.param_groups for p in group["params"]):
            weight.grad = torch.zeros_like(weight)
        trial.step()
        return {name: torch.zeros_like(t) for name, t in optimizer_state(trial).items()}

    def _stacked(self, name: str) -> Tensor:
        """What a client's weight, buffer or optimizer state is a row of."""
        return (self.tensors[name] if name in self.tensors else self.state[name]).detach()

    def _one_row(self) -> FixedStack:
        alone = FixedStack(self.algorithm, self.row(0), self.template, self.fabric, 1)
        alone.sums, alone.weights, alone.rates = self.sums, self.weights, self.rates
        alone.compared, alone.recorder = self.compared, self.recorder
        return alone

    def _set_rates(self, step: int) -> None:
        if self.algorithm.step_factors:
            set_learning_rate(self.template, self.algorithm.step_factors[step])
        if step == 0 or self.algorithm.step_factors:
            for rate, group in zip(self.rates, self.template.param_groups, strict=True):
                rate.fill_(group["lr"])

    def _set_correction(self, clients: Sequence[Client]) -> None:
        wanted = any(client.work.correction for client in clients)
        self.correction = self.room_for_corrections() if wanted else {}
        for name, room in self.correction.items():
            room.zero_()
            for row, client in enumerate(clients):
                if name in client.work.correction:
                    room[row].copy_(client.work.correction[name])

    def room_for_corrections(self) -> State:
        """One for every weight, kept from the first time on: a recorded step reads where it was."""
        if not self._correction_room:
            self._correction_room = {name: torch.zeros_like(self._stacked(name)) for name in self.order}
        return self._correction_room

    def _mask(self, rows: Sequence[int]) -> Tensor:
        """Which rows have a batch: ``(clients,)`` bool."""
        key = tuple(rows)
        if key not in self._masks:
            mask = torch.tensor([row in key for row in range(self.clients)])
            self._masks[key] = mask.to(self.device, non_blocking=True)
        return self._masks[key]

    def _put_aside(self, row: int, values: list[Tensor]) -> None:
        if row not in self._aside:
            self._aside[row] = [torch.empty_like(t) for t in values]
        torch._foreach_copy_(self._aside[row], values)


def _largest(change: Tensor) -> float:
    return float(change.abs().nan_to_num(0, posinf=0).max()) if change.numel() else 0.0


def _shape(batch: Batch) -> Shape:
    return tuple((name, t.shape) for name, t in batch.items())


def _check(template: Optimizer) -> None:
    name = type(template).__name__
    if type(template) not in (SGD, Adam, AdamW) or not all(group.get("fused") for group in template.param_groups):
        raise FixedMemoryError(f"of the optimizers fused SGD, Adam and AdamW can, and this is {name}")
    if any(group.get("dampening") for group in template.param_groups):
        raise FixedMemoryError("the first step of SGD with dampening is unlike the others")


class Recorder:
    """Makes CUDA graphs of steps, until that has failed once in the process.

    Graphs share a pool of memory: nothing of one that another could overwrite is read after its replay.

    Args:
        device: Where the steps run; elsewhere than on a CUDA device nothing is recorded.
    """

    broken = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.works = device.type == "cuda" and not Recorder.broken
        self._pool = torch.cuda.graph_pool_handle() if self.works else None
        self._side = torch.cuda.Stream(device) if self.works else None

    def __call__(self, step: Callable[[], None]) -> Callable[[], object] | None:
        """What replays a step; None, and one warning, if it cannot be recorded."""
        try:
            return self.record(step)
        except Exception as error:
            Recorder.broken = True
            self.give_up(str(error).partition("\n")[0])
            return None

    def give_up(self, reason: str) -> None:
        """Record nothing from now on, and say why, once."""
        if self.works:
            self.works = False
            _log.warning("trainer.cuda_graphs: steps are not replayed as a graph: %s", reason)

    def record(self, step: Callable[[], None]) -> Callable[[], object]:
        """A graph of a step, after some steps on the same side stream, as recording asks for.

        The last of them fails where the host waits for the device, because a recording that fails leaves PyTorch's
        allocator and its current stream in a state that older versions do not mend (pytorch issue 180395).
        """
        assert self._side is not None
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(here):  # puts it back whatever happens
            self._side.wait_stream(here)
            try:
                with torch.cuda.stream(self._side):
                    step()
                    step()
                    with _host_may_not_wait():
                        step()
            finally:  # what undoes the steps must come after them
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
