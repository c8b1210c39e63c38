"""Batch and group norm of stacked clients in one kernel: the clients are folded into the channels.

``vmap``'s own rules take the scale and the shift out of the kernel, which costs further kernels and keeps more
activations for the backward pass. Channels (and groups of them) are normalised apart from one another anyway, so
``clients * channels`` channels give the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Dims = tuple[int | None, ...]


class FoldedNorms(TorchFunctionMode):
    """Inside this context and inside ``vmap``, ``F.batch_norm`` and ``F.group_norm`` fold the clients into channels.

    For a backward pass outside ``vmap`` only.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        folded = _FOLDED.get(func)
        if folded is None:
            return func(*args, **(kwargs or {}))
        function, signature = folded
        bound = signature.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return function.apply(*bound.args)


class _FoldedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *arguments: Any) -> Tensor:
        return F.batch_norm(x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        # A slice of contiguous buffers is folded without a copy, so that the kernel updates the stack itself.
        tensors = zip((mean, variance, weight, bias), in_dims[1:5], strict=True)
        mean, variance, weight, bias = (_fold(tensor, dim, clients) for tensor, dim in tensors)
        out = F.batch_norm(_fold_channels(x, in_dims[0], clients), mean, variance, weight, bias, *settings)
        return out.unflatten(1, (clients, -1)), 1


class _FoldedGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *arguments: Any) -> Tensor:
        return F.group_norm(x, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        affine = (_fold(weight, in_dims[2], clients), _fold(bias, in_dims[3], clients))
        out = F.group_norm(_fold_channels(x, in_dims[0], clients), clients * groups, *affine, eps)
        return out.unflatten(1, (clients, -1)), 1


_FOLDED: dict[Any, tuple[type[torch.autograd.Function], inspect.Signature]] = {
    F.batch_norm: (_FoldedBatchNorm, inspect.signature(F.batch_norm)),
    F.group_norm: (_FoldedGroupNorm, inspect.signature(F.group_norm)),
}


def _fold_channels(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """``(batch, clients * channels, ...)``; free after a stacked convolution, whose output lies in memory this way."""
    stacked = x.unsqueeze(1).expand(-1, clients, *x.shape[1:]) if dim is None else x.movedim(dim, 1)
    return stacked.flatten(1, 2)


def _fold(values: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """One value per channel, ``(channels,)`` of each client, as ``(clients * channels,)``."""
    if values is None:
        return None
    return values.repeat(clients) if dim is None else values.movedim(dim, 0).flatten()
