"""Optimizers over the stacked weights of several clients; each client has its own state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.local_training.ops.optimizer_step import step_by_torch
from lightning_fedssl.state import load_optimizer_state, optimizer_state, set_learning_rate

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose update of a weight depends only on that weight's gradient and history."""


Absent = Mapping[int, Container[int]]
"""The rows without a gradient, by the number of the weight in the optimizer's order."""

NONE_ABSENT: Absent = {}


class ClientOptimizers(Protocol):
    """The optimizers of the clients in a stack; row c is client c."""

    def narrow(self, leaves: Sequence[Tensor]) -> None:
        """From now on only the first rows are trained.

        Args:
            leaves: The weights in the optimizer's order, ``(clients still training, ...)`` each.
        """

    def set_learning_rate(self, factor: float) -> None:
        """Set the learning rate of the next step to a factor times the configured one."""

    def step(self, absent: Absent = NONE_ABSENT) -> None:
        """Make a step with the gradients of the leaves.

        Args:
            absent: Weights that a client's loss did not reach, which must stay as they are; only after
                :meth:`with_absent`.
        """

    def with_absent(self) -> ClientOptimizers:
        """Optimizers with the same states whose steps may leave out a weight for some of the clients."""

    def state_of(self, row: int) -> State:
        """A client's state as :func:`lightning_fedssl.state.optimizer_state` gives it."""


def client_optimizers(template: Optimizer, kept: Sequence[State]) -> ClientOptimizers:
    """Optimizers of the same class and settings as the template.

    Args:
        template: Gives the class, the parameter groups and the learning rate; its parameters are not touched.
        kept: Each client's optimizer state from its last participation; empty for a new state.
    """
    stacked = _stacked_state(template, kept)
    return _Separate(template, kept) if stacked is None else _Together(template, stacked, len(kept))


def _stacked_state(template: Optimizer, kept: Sequence[State]) -> State | None:
    """The clients' states stacked; None if one optimizer cannot hold them, for example if step counts differ."""
    if any(p.dim() == 0 for group in template.param_groups for p in group["params"]):
        return None  # a weight without dimensions cannot be distinguished from a step counter
    known = {name: value for state in kept for name, value in state.items()}
    # Only without dampening is the first step of SGD the step from a momentum of zero.
    fills = isinstance(template, torch.optim.SGD) and not any(group["dampening"] for group in template.param_groups)
    if not fills and any(state.keys() != known.keys() for state in kept):
        return None
    stacked: State = {}
    for name, value in known.items():
        values = [state[name] if name in state else torch.zeros_like(value) for state in kept]
        if value.dim() == 0 and any(not torch.equal(value, other) for other in values):
            return None
        stacked[name] = torch.stack(values) if value.dim() else value
    return stacked


class _Together:
    """One optimizer over the stacked tensors."""

    def __init__(self, template: Optimizer, state: State, clients: int) -> None:
        self.template = template
        self.state = state
        self.width = clients
        self.finished: dict[int, State] = {}
        self.optimizer: Optimizer | None = None

    def narrow(self, leaves: Sequence[Tensor]) -> None:
        self._keep_finished(len(leaves[0]))
        self.optimizer = like(self.template, leaves)
        load_optimizer_state(self.optimizer, {k: v[: self.width] if v.dim() else v for k, v in self.state.items()})

    def set_learning_rate(self, factor: float) -> None:
        assert self.optimizer is not None
        set_learning_rate(self.optimizer, factor)

    def step(self, absent: Absent = NONE_ABSENT) -> None:
        assert self.optimizer is not None
        step_by_torch(self.optimizer)

    def with_absent(self) -> ClientOptimizers:
        if _ignores_zeros(self.template):
            return self
        assert self.optimizer is not None
        width, leaves = self.width, [p for group in self.optimizer.param_groups for p in group["params"]]
        self._keep_finished(0)
        separate = _Separate(self.template, [self.finished.pop(row) for row in range(width)])
        separate.finished = self.finished
        separate.narrow(leaves)
        return separate

    def state_of(self, row: int) -> State:
        if row < self.width:
            self._keep_finished(0)
        return self.finished[row]

    def _keep_finished(self, width: int) -> None:
        """Store the states of the clients from row ``width`` on, which have finished, with the step counts."""
        if self.optimizer is not None:
            self.state = optimizer_state(self.optimizer)
        for row in range(width, self.width):
            self.finished[row] = {k: (v[row] if v.dim() else v).clone() for k, v in self.state.items()}
        self.width = width


class _Separate:
    """One optimizer per client over its rows: exact for any state, with more kernels."""

    def __init__(self, template: Optimizer, kept: Sequence[State]) -> None:
        self.template = template
        self.kept = kept
        self.leaves: Sequence[Tensor] = ()
        self.rows: list[list[Tensor]] = []
        self.optimizers: list[Optimizer] = []
        self.finished: dict[int, State] = {}

    def narrow(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        if self.optimizers:
            return
        for row, state in enumerate(self.kept):
            self.rows.append([leaf.detach()[row] for leaf in leaves])
            self.optimizers.append(like(self.template, self.rows[row]))
            load_optimizer_state(self.optimizers[row], state)

    def set_learning_rate(self, factor: float) -> None:
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, factor)

    def step(self, absent: Absent = NONE_ABSENT) -> None:
        for row in range(len(self.leaves[0])):
            for i, (weight, leaf) in enumerate(zip(self.rows[row], self.leaves, strict=True)):
                weight.grad = None if leaf.grad is None or row in absent.get(i, ()) else leaf.grad[row]
            step_by_torch(self.optimizers[row])

    def with_absent(self) -> ClientOptimizers:
        return self

    def state_of(self, row: int) -> State:
        return self.finished[row] if row in self.finished else optimizer_state(self.optimizers[row])


def _ignores_zeros(template: Optimizer) -> bool:
    """Whether a weight with a gradient of 0 stays as it is, as one without a gradient does."""
    groups = template.param_groups
    return isinstance(template, torch.optim.SGD) and not any(g["momentum"] or g["weight_decay"] for g in groups)


def like(template: Optimizer, tensors: Sequence[Tensor]) -> Optimizer:
    """An optimizer of the same class and settings over other tensors, without a state."""
    remaining = iter(tensors)
    groups = [{**group, "params": [next(remaining) for _ in group["params"]]} for group in template.param_groups]
    return _with_groups(template, groups)


def part_of(template: Optimizer, kept: Container[int]) -> Optimizer:
    """An optimizer of the same class and settings over some of the weights, without a state.

    Args:
        template: The optimizer.
        kept: The ``id`` of each weight that remains.
    """
    groups = [{**group, "params": [p for p in group["params"] if id(p) in kept]} for group in template.param_groups]
    return _with_groups(template, [group for group in groups if group["params"]])


def _with_groups(template: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    optimizer: Optimizer = object.__new__(type(template))
    # A learning-rate scheduler replaces "step" by a function that makes a step of the template.
    optimizer.__dict__.update({name: value for name, value in vars(template).items() if name != "step"})
    optimizer.param_groups = groups
    optimizer.state = defaultdict(dict)
    return optimizer
