"""Layers of stacked clients for which the rule of ``vmap`` is slow, or fails in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class StackedLayers(TorchFunctionMode):
    """Replaces ``F.linear`` and ``F.batch_norm`` inside ``vmap``.

    The results are the same up to rounding.

    ``vmap`` multiplies the inputs by the transposed weights. So the gradient of the weights comes
    out transposed, which is slow to compute on a CPU, and is copied to the layout of the weights.
    Here the weights come first. Its batch norm on a CUDA device refuses activations of 16 bits with
    statistics of 32, and activations with the channels last. Here it computes in 32 bits on
    contiguous activations.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() != 2:
        return F.linear(input, weight, bias)
    out = (weight @ input.mT).mT
    return (
        out if bias is None else out + bias.to(out.dtype)
    )  # in mixed precision a bias has 32 bits


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, *others: Any, **settings: Any
) -> Tensor:
    dtype = input.dtype if running_mean is None else running_mean.dtype
    return F.batch_norm(input.contiguous().to(dtype), running_mean, *others, **settings).to(
        input.dtype
    )


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.batch_norm: _batch_norm,
}
