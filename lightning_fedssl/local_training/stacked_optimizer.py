"""An optimizer over the stacked weights of several clients; each client has its own state."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.by_name import copied, mapped
from lightning_fedssl.functional.optimizer_states import load_optimizer_state, optimizer_state
from lightning_fedssl.functional.optimizers import weights_of

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


class StackedOptimizer:
    """One optimizer of the template's class and settings.

    Row c of its weights and states is client c.

    Args:
        template: Gives the class, the parameter groups and the learning rate; its parameters are
            not touched.
        kept: Each client's optimizer state from its last participation; empty for a new state.

    Raises:
        ValueError: One optimizer cannot have these states.
    """

    def __init__(self, template: Optimizer, kept: Sequence[State]) -> None:
        self.template = template
        self.state = _stacked(template, kept)
        self.width = len(kept)
        self.finished: dict[int, State] = {}
        self.optimizer: Optimizer | None = None

    def narrow(self, leaves: Sequence[Tensor]) -> Optimizer:
        """The optimizer of the first rows; the other clients have finished.

        Args:
            leaves: The weights in the optimizer's order, ``(clients still training, ...)`` each.
        """
        self._finish(len(leaves[0]))
        self.optimizer = like(self.template, leaves)
        load_optimizer_state(self.optimizer, _rows(self.state, slice(self.width)))
        return self.optimizer

    def state_of(self, row: int) -> State:
        """A client's state as :mod:`~lightning_fedssl.functional.optimizer_states` has it."""
        self._finish(0)
        return self.finished[row]

    def _finish(self, width: int) -> None:
        """Store the states of the clients from row ``width`` on, with the step counts."""
        if self.optimizer is not None:
            self.state = optimizer_state(self.optimizer)
        for row in range(width, self.width):
            self.finished[row] = copied(_rows(self.state, row))
        self.width = min(width, self.width)


def _rows(state: State, rows: int | slice) -> State:
    """Those rows of a stacked state; what has none, such as a count of steps, is everybody's."""
    return mapped(lambda t: t[rows] if t.dim() else t, state)


def _stacked(template: Optimizer, kept: Sequence[State]) -> State:
    """The clients' states stacked; a momentum that a client lacks is 0."""
    if not all(p.dim() for p in weights_of(template)):
        raise ValueError(
            "a weight has no dimensions, so its momentum cannot be distinguished from a count of "
            "steps"
        )
    known: State = {}
    for state in kept:
        known |= state
    # Only without dampening is the first step of SGD the step from a momentum of 0.
    fills = isinstance(template, torch.optim.SGD) and not any(
        group["dampening"] for group in template.param_groups
    )
    stacked = {}
    for name, value in known.items():
        values = [state[name] if name in state else torch.zeros_like(value) for state in kept]
        counts_differ = value.dim() == 0 and any(not torch.equal(value, other) for other in values)
        if counts_differ or (not fills and any(name not in state for state in kept)):
            raise ValueError(
                f"the optimizers of the clients have made different numbers of steps ({name})"
            )
        stacked[name] = torch.stack(values) if value.dim() else value
    return stacked


def like(template: Optimizer, tensors: Sequence[Tensor]) -> Optimizer:
    """An optimizer of the same class and settings over other tensors, without a state."""
    remaining = iter(tensors)
    return _remade(template, lambda weights: list(islice(remaining, len(weights))))


def part_of(template: Optimizer, kept: Container[int]) -> Optimizer:
    """An optimizer of the same class and settings over some of the weights, without a state.

    Args:
        template: The optimizer.
        kept: The ``id`` of each weight that remains.
    """
    return _remade(template, lambda weights: [p for p in weights if id(p) in kept])


def _remade(template: Optimizer, of_group: Callable[[list[Tensor]], list[Tensor]]) -> Optimizer:
    """An optimizer of the same class and settings, with other weights in each group."""
    groups = []
    for group in template.param_groups:
        if weights := of_group(group["params"]):
            groups.append({**group, "params": weights})
    kind: Any = type(template)
    return cast(Optimizer, kind(groups))
