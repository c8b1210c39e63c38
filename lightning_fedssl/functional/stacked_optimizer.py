"""The optimizers that can train the stacked weights of several clients, and their states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import map_values
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


def rows_of(state: State, rows: int | slice) -> State:
    """Those rows of a stacked state; what has none, such as a count of steps, is everybody's."""
    return map_values(lambda t: t[rows] if t.dim() else t, state)


def stacked_state(template: Optimizer, states: Sequence[State]) -> State:
    """The state of one optimizer over the stacked weights of several clients; a momentum that a
    client lacks is 0.

    Args:
        template: Gives the class and the settings.
        states: Each client's optimizer state from its last participation; empty for a new state.

    Raises:
        ValueError: One optimizer cannot have these states.
    """
    if not all(p.dim() for p in weights_of(template)):
        raise ValueError(
            "a weight has no dimensions, so its momentum cannot be distinguished from a count of "
            "steps"
        )
    examples: State = {}
    for state in states:
        examples |= state
    # Only without dampening is the first step of SGD the step from a momentum of 0.
    fills = isinstance(template, torch.optim.SGD) and not any(
        group["dampening"] for group in template.param_groups
    )
    stacked = {}
    for name, value in examples.items():
        values = [state[name] if name in state else torch.zeros_like(value) for state in states]
        counts_differ = value.dim() == 0 and any(not torch.equal(value, other) for other in values)
        if counts_differ or (not fills and any(name not in state for state in states)):
            raise ValueError(
                f"the optimizers of the clients have made different numbers of steps ({name})"
            )
        stacked[name] = torch.stack(values) if value.dim() else value
    return stacked
