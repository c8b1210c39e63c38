"""Linear layers of stacked clients, for which the rule of ``vmap`` is slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class StackedLayers(TorchFunctionMode):
    """Replaces ``F.linear`` inside ``vmap``; the results are the same up to rounding.

    ``vmap`` multiplies the inputs by the transposed weights. So the gradient of the weights comes out transposed, which
    is slow to compute on a CPU, and is copied to the layout of the weights. Here the weights come first.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() != 2:
        return F.linear(input, weight, bias)
    out = (weight @ input.mT).mT
    return out if bias is None else out + bias.to(out.dtype)  # in mixed precision a bias has 32 bits
