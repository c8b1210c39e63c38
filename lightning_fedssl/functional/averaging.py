"""Weighted averages of model states, summed as the states arrive, and the server's momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Named tensors: the parameters or buffers of a model, or whatever else travels between a server and its clients."""


class WeightedSum:
    """A running weighted sum of states; it keeps one state in memory however many are added."""

    def __init__(self) -> None:
        self.total: State = {}
        self.weight = 0.0
        self.count = 0

    def add(self, state: State, weight: float = 1.0) -> None:
        """Add ``weight * state``. The state is read at once and not kept.

        Args:
            state: Floating tensors; the same names every time.
            weight: Not negative. A state of weight 0 leaves the sum as it is, whatever it holds.
        """
        self.count += 1
        if weight == 0:
            return
        self.weight += weight
        if not self.total:
            self.total = dict(zip(state, torch._foreach_mul(list(state.values()), weight), strict=True))
        else:
            torch._foreach_add_(list(self.total.values()), [state[name] for name in self.total], alpha=weight)

    def mean(self) -> State | None:
        """The weighted mean, or None if nothing with a weight was added."""
        if self.weight == 0:
            return None
        return dict(zip(self.total, torch._foreach_div(list(self.total.values()), self.weight), strict=True))


def momentum_step(server: State, mean: State, buffer: State, momentum: float, lr: float = 1.0) -> tuple[State, State]:
    """One server step along the pseudo-gradient ``server - mean`` (FedAvgM; SemiFL Table 4, beta_g).

    ``buffer <- momentum * buffer + (server - mean)``, ``server <- server - lr * buffer``; an empty buffer starts as the
    pseudo-gradient. Momentum 0 with learning rate 1 is exactly the mean.

    Args:
        server: The weights that were sent to the clients.
        mean: The weighted mean of what came back.
        buffer: The momentum buffer, empty before the first step.
        momentum: beta_g.
        lr: eta_g.

    Returns:
        The new weights and the new buffer.
    """
    if momentum == 0 and lr == 1:
        return mean, buffer
    names = list(mean)
    old, new = [server[name] for name in names], list(mean.values())
    step = list(torch._foreach_sub(old, new))
    if momentum:
        if buffer:
            step = list(torch._foreach_add(step, [buffer[name] for name in names], alpha=momentum))
        buffer = dict(zip(names, step, strict=True))
    return dict(zip(names, torch._foreach_sub(old, torch._foreach_mul(step, lr)), strict=True)), buffer


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number in the tensors is finite; one read of the device.

    A sum carries every NaN and infinity along, and is the cheapest way to look at all numbers. It also refuses numbers
    so large that their sum overflows.
    """
    sums = [t.sum() for t in tensors]
    return not sums or math.isfinite(float(torch.stack(sums).sum()))


def sizes_of(state: State) -> dict[str, int]:
    """What each tensor of a state weighs on the wire, in bytes."""
    return {name: t.nbytes for name, t in state.items()}
