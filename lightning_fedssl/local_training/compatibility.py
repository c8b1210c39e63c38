"""The compatibility check: whether clients of a method can be stacked, and how many fit, before the first round."""

from __future__ import annotations

import copy
import functools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.keyed_dropout import keyed
from lightning_fedssl.local_training import vectorized
from lightning_fedssl.local_training.cuda_graphs import CHAIN, FixedMemory
from lightning_fedssl.local_training.ops.loss_check import LossError, check_loss
from lightning_fedssl.local_training.ops.stacked_optimizer import like
from lightning_fedssl.local_training.sequential import NoObserver, start
from lightning_fedssl.metrics import MetricCollector
from lightning_fedssl.state import Batch, LiveTensors, load_state

CLIENTS = 3
"""The number of clients in the compatibility check."""

STEPS = 2
"""Steps of each client in the check: a method may do something else at its first step than at the later ones."""

RATE = 0.01
"""The learning rate of plain gradient descent between the steps of the check."""

TOLERANCE = 1e-4
"""Largest relative difference of a gradient, buffer or scalar; rounding in float64 gives about 1e-12."""

MEMORY_SHARE = 0.85
"""Part of the free memory that a stack may fill; the rest is for fragments and for kernels' workspaces."""

MODELS_OF_A_ROUND = 4
"""Models that a round may hold in addition to a stack: sum of updates, momentum and optimizer state of the server."""


class CannotTrainTogetherError(Exception):
    """The clients of a method must train sequentially; the text is the reason."""


@dataclass
class _Outcome:
    """The result of one step of one client."""

    gradients: State
    buffers: State


@dataclass
class _Tried:
    """What a client did in the check.

    Attributes:
        data: The client's data.
        attributes: The attributes of the modules before its first step.
        outcomes: The result of each of its steps.
    """

    data: LocalData
    attributes: dict[str, Any]
    outcomes: list[_Outcome]


def try_together(algorithm: FederatedAlgorithm, clients: Iterable[LocalData]) -> list[LocalData]:
    """Make two steps of a few clients, sequentially and stacked, on a copy in float64, and compare.

    The check changes neither the algorithm nor its client store, its logs or torch's random state.

    Args:
        algorithm: The algorithm, before its clients train.
        clients: The clients of the round.

    Returns:
        The clients of the check; empty if fewer than two clients train in this round, so that nothing was checked.

    Raises:
        CannotTrainTogetherError: The clients cannot be stacked; the text is the reason.
        LossError: A step returns no loss, so that the clients cannot be trained at all.
    """
    try:
        with _no_trace(algorithm):
            return _compare(_in_float64(_clone(algorithm)), clients)
    except (CannotTrainTogetherError, LossError):
        raise
    except Exception as error:
        raise CannotTrainTogetherError(where(error)) from error


@dataclass(frozen=True)
class StackMemory:
    """The memory of stacks on a CUDA device, as a linear function of the number of clients.

    Attributes:
        fixed: Bytes of a stack without clients.
        per_client: Bytes that each client adds.
        free: Bytes that are free for a stack.
    """

    fixed: float
    per_client: float
    free: float

    @classmethod
    def measured(cls, peak: Callable[[int], int], tried: int, free: int) -> StackMemory:
        """The line through the measurements of one client and of several.

        Args:
            peak: Memory in bytes of a number of clients together.
            tried: The larger number to try, from 2.
            free: Free memory in bytes.
        """
        one, several = peak(1), peak(tried)
        per_client = max((several - one) / (tried - 1), one / 10, 1.0)
        return cls(one - per_client, per_client, free)

    def of(self, clients: int) -> float:
        """Bytes of a stack."""
        return self.fixed + clients * self.per_client

    def largest_number(self) -> int:
        """The largest number of clients that fit, with a margin; at least 1."""
        return max(1, int((MEMORY_SHARE * self.free - self.fixed) / self.per_client))


def memory_of_stacks(
    algorithm: FederatedAlgorithm,
    tried: Sequence[LocalData],
    optimizer: Optimizer,
    fabric: Fabric,
    cuda_graphs: bool = False,
) -> StackMemory:
    """The memory of stacks on a CUDA device, measured in the way in which clients will train.

    Args:
        algorithm: The algorithm, before its clients train.
        tried: What :func:`try_together` returned.
        optimizer: The clients' optimizer.
        fabric: Gives precision and the device.
        cuda_graphs: Train over static buffers and record the steps, which takes several times as much.
    """
    device = fabric.device
    largest = max(tried, key=lambda data: len(data.labeled) + len(data.unlabeled))  # some are smaller than a batch

    def peak(number: int) -> int:
        clone = _clone(algorithm)
        clone.collector = MetricCollector().update
        names = {id(p): name for name, p in algorithm.named_parameters()}
        weights = dict(clone.named_parameters())
        order = [weights[names[id(p)]] for group in optimizer.param_groups for p in group["params"]]
        vectorized.free_memory(device)
        # Graphs keep memory that is in no tensor's use between replays: reserved, not allocated.
        in_use, most = (
            (torch.cuda.memory_reserved, torch.cuda.max_memory_reserved)
            if cuda_graphs
            else (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
        )
        before = in_use(device)
        torch.cuda.reset_peak_memory_stats(device)
        updates = vectorized.train_clients(
            clone, [largest] * number, like(optimizer, order), fabric, NoObserver(), CHAIN, clients_at_once=number,
            trainer=FixedMemory(number) if cuda_graphs else None, halved=_refuse_to_halve,
        )  # fmt: skip
        for _ in updates:
            pass
        return most(device) - before

    try:
        with _no_trace(algorithm):
            peak(1)  # memory that kernels allocate only once
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free, _ = torch.cuda.mem_get_info(device)
            stacks = StackMemory.measured(peak, len(tried), free + unused)
            return replace(stacks, fixed=stacks.fixed + MODELS_OF_A_ROUND * _bytes_of_model(algorithm))
    except (torch.OutOfMemoryError, vectorized.NoRoomError):
        return StackMemory(0.0, 1.0, 0.0)  # one client
    finally:
        vectorized.free_memory(device)


def _bytes_of_model(algorithm: FederatedAlgorithm) -> int:
    """Bytes of the global model in the allocator's blocks of 512."""
    return sum(-(-t.nbytes // 512) * 512 for t in algorithm.server.model().values())


def _refuse_to_halve(clients: int) -> None:
    raise vectorized.NoRoomError(f"only {clients} clients fit")


def _compare(clone: FederatedAlgorithm, clients: Iterable[LocalData]) -> list[LocalData]:
    log_alone, log_together = MetricCollector(), MetricCollector()
    tried = list(islice(_each_alone(clone, clients, log_alone), CLIENTS))
    if len(tried) < 2:
        return []
    _refuse_difference("on_client_start", tried[0].attributes, tried[1].attributes)
    clone.collector = log_together.update
    together = _steps_together(clone, [client.data for client in tried])
    for client in tried:
        for step, alone in enumerate(client.outcomes):
            _refuse_other_outcome(alone, together[client.data.party][step])
    _refuse_unlike("scalar", _means(log_alone), _means(log_together), 1e-8)
    return [client.data for client in tried]


def _refuse_other_outcome(alone: _Outcome, together: _Outcome) -> None:
    scale = max((float(g.abs().nan_to_num(0, 0).max()) for g in alone.gradients.values() if g.numel()), default=0.0)
    # A weight that only other clients' batches reach has a gradient of 0 in the stack, and none alone.
    unreached = {name: torch.zeros_like(g) for name, g in together.gradients.items()}
    _refuse_unlike("gradient", {**unreached, **alone.gradients}, together.gradients, TOLERANCE * scale)
    _refuse_unlike("buffer", alone.buffers, together.buffers, 1e-8)


def _each_alone(clone: FederatedAlgorithm, clients: Iterable[LocalData], log: MetricCollector) -> Iterator[_Tried]:
    """The first steps of the clients that train; a client that skips the round logs nothing."""
    scalars: list[tuple[str, Any, float]] = []
    clone.collector = lambda name, value, weight: scalars.append((name, value, weight))
    for data in clients:
        scalars.clear()
        with _restored(clone):
            tried = _steps_alone(clone, data)
        if tried is not None:
            for scalar in scalars:
                log.update(*scalar)
            yield tried


@contextmanager
def _restored(clone: FederatedAlgorithm) -> Iterator[None]:
    """Restore weights and buffers at the end: what a client does not load would be the result of the one before."""
    before = {name: t.detach().clone() for name, t in (*clone.named_parameters(), *clone.named_buffers())}
    yield
    load_state(clone, before)


def _steps_alone(clone: FederatedAlgorithm, data: LocalData) -> _Tried | None:
    """A client's first steps by the sequential trainer; None if the client skips the round."""
    work = start(clone, LiveTensors(clone), replace(data, dtype=torch.float64), NoObserver(), STEPS)
    if work.num_steps == 0:
        return None
    tried, loss_of = _Tried(data, _attributes(clone), []), keyed(clone, data, clone.training_step)
    clone.train()
    for step in range(work.num_steps):
        clone.zero_grad()
        batch: Batch = _double(work.batch(step))
        loss = loss_of(batch, step)
        if loss is None:
            raise CannotTrainTogetherError("training_step returned None, to skip the batch")
        check_loss(loss, clone, "training_step")
        loss.backward()
        clone.log("client/loss", loss.detach(), batch_size=len(next(iter(batch.values()))))
        _refuse_difference("training_step", tried.attributes, _attributes(clone))
        gradients = {name: p.grad.clone() for name, p in clone.named_parameters() if p.grad is not None}
        tried.outcomes.append(_Outcome(gradients, {name: b.clone() for name, b in clone.named_buffers()}))
        _descend(dict(clone.named_parameters()))
    return tried


def _steps_together(clone: FederatedAlgorithm, clients: Sequence[LocalData]) -> dict[int, list[_Outcome]]:
    """The same steps of all clients stacked, with NaN in the working module's weights to find a read of them.

    Returns:
        The outcomes of each client's steps.
    """
    ready = list(vectorized.prepared(clone, [replace(d, dtype=torch.float64) for d in clients], NoObserver(), STEPS))
    ready.sort(key=lambda client: -client.work.num_steps)
    stack = vectorized.Stack.of(clone, ready)
    for parameter in clone.parameters():
        parameter.detach().fill_(math.nan)
    clone.train()
    buffers = [name for name, _ in clone.named_buffers()]
    found: dict[int, list[_Outcome]] = {client.data.party: [] for client in ready}
    for step in range(ready[0].work.num_steps):
        training = [client for client in ready if client.work.num_steps > step]
        stack.narrow(len(training))
        stack.loss([_double(client.work.batch(step)) for client in training], step).backward()
        gradients = {name: leaf.grad for name, leaf in stack.leaves.items() if leaf.grad is not None}
        for row, client in enumerate(training):
            outcome = _Outcome(
                {name: g[row] for name, g in gradients.items()}, {k: stack.rest[k][row].clone() for k in buffers}
            )
            found[client.data.party].append(outcome)
        _descend(stack.leaves)
    stack.report([client.data.party for client in ready])
    return found


def _descend(weights: State) -> None:
    """A step of plain gradient descent: optimizers are not compared, because each client has its own."""
    for weight in weights.values():
        if weight.grad is not None:
            weight.detach().sub_(weight.grad, alpha=RATE)


def _means(log: MetricCollector) -> State:
    return {name: torch.tensor(value) for name, value in log.compute(lambda own: [own]).items()}


def _refuse_unlike(kind: str, alone: State, together: State, atol: float) -> None:
    for name in sorted(alone.keys() | together.keys()):
        a, b = alone.get(name), together.get(name)
        if a is None or b is None or not torch.allclose(b, a, rtol=TOLERANCE, atol=atol, equal_nan=True):
            raise CannotTrainTogetherError(f"a stacked step gives another {kind} {name} than a sequential one")


def _refuse_difference(method: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise CannotTrainTogetherError(
                f"{method} changes the attribute {name}, which clients that train together would share"
            )


def _attributes(algorithm: FederatedAlgorithm) -> dict[str, Any]:
    """Every attribute of every module, except parameters and buffers, which are stacked."""
    return {
        f"{path}.{name}".lstrip("."): _identity(value)
        for path, module in algorithm.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }


_OF_MODULES = ("_parameters", "_buffers", "_modules", "training")


def _identity(value: Any) -> Any:
    """A fingerprint that changes with the value, also if it is changed in place."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return {repr(key): _identity(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_identity(item) for item in value]
    return repr(value) if isinstance(value, (bool, int, float, str)) else id(value)


def _double(value: Any) -> Any:
    """The batch with floating tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) is dict:
        return {key: _double(item) for key, item in value.items()}
    return type(value)(map(_double, value)) if type(value) in (list, tuple) else value


def _in_float64(clone: FederatedAlgorithm) -> FederatedAlgorithm:
    """Use float64, in which rounding errors cannot be confused with a different computation."""
    clone.double()
    for holder in (*clone.modules(), clone.server):
        attributes = {name: value for name, value in vars(holder).items() if name not in _OF_MODULES}
        vars(holder).update(_double(attributes))
    return clone


def _clone(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """A copy of the algorithm that shares with it only the trainer and configured factories.

    A configured factory refers to its parser and through it to the training images.
    """
    trainer, federation = vars(algorithm).get("_trainer"), vars(algorithm).get("federation")
    shared: dict[int, Any] = {
        id(algorithm.clients): algorithm.clients.clone(),
        id(algorithm.collector): None,
        id(trainer): trainer,
        **{id(value): value for value in vars(algorithm).values() if isinstance(value, functools.partial)},
    }
    clone = copy.deepcopy(algorithm, shared)
    vars(clone)["_trainer"] = trainer  # the copy of a module has neither
    vars(clone)["federation"] = federation
    return clone


def _no_trace(algorithm: FederatedAlgorithm) -> AbstractContextManager[None]:
    """A context that restores torch's random state at its end."""
    device = next(algorithm.parameters()).device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def where(error: Exception) -> str:
    """An error's first line, and the line of the method's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in Path(f.filename).parts for part in ("torch", "local_training"))]
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno}, `{own[-1].line}`): {text}" if own else text
