"""Weighted averages of model states by running sums."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors by name: the parameters or buffers of a model, or other tensors that server and clients
exchange."""

Sizes = dict[str, int]
"""Bytes of tensors by name."""


class WeightedSum:
    """A running weighted sum of states; its memory is that of one state, however many are added."""

    def __init__(self) -> None:
        self.total: State = {}
        self.weight = 0.0
        self.count = 0

    def add(self, state: State, weight: float = 1.0) -> None:
        """Add ``weight * state``; no reference to the state is stored.

        Args:
            state: Floating tensors; the same names in every call.
            weight: Not negative. A state of weight 0 does not change the sum, even if it contains
                NaN.
        """
        self.count += 1
        if weight == 0:
            return
        self.weight += weight
        if not state:  # such as the buffers of a model without any
            return
        if not self.total:
            self.total = dict(
                zip(state, torch._foreach_mul(list(state.values()), weight), strict=True)
            )
        else:
            torch._foreach_add_(
                list(self.total.values()), [state[name] for name in self.total], alpha=weight
            )

    def mean(self) -> State | None:
        """The weighted mean, or None if no state with a positive weight was added."""
        if self.weight == 0:
            return None
        if not self.total:
            return {}
        return dict(
            zip(self.total, torch._foreach_div(list(self.total.values()), self.weight), strict=True)
        )


Sums = dict[str, WeightedSum]
"""What the server sums over the clients, by name."""


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number in the tensors is finite; it waits for the device once.

    The sum of a tensor is not finite if one of its numbers is NaN or infinite, and it is cheap to
    compute. The function also returns False for finite numbers so large that their sum overflows.
    """
    wide = torch.float32  # in 16 bits the sum of ordinary numbers may overflow
    sums = [t.sum(dtype=torch.promote_types(t.dtype, wide)) for t in tensors]
    return not sums or math.isfinite(float(torch.stack(sums).sum()))


def sizes_of(state: State) -> Sizes:
    """The size of each tensor of a state in bytes, by name."""
    return {name: t.nbytes for name, t in state.items()}
