"""Layers of stacked clients for which the rule of ``vmap`` is slow, or fails in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class StackedLayers(TorchFunctionMode):
    """Replaces ``F.linear``, ``F.batch_norm`` and ``F.group_norm`` inside ``vmap``.

    The results are the same up to rounding.

    ``vmap`` multiplies the inputs by the transposed weights. So the gradient of the weights comes
    out transposed, which is slow to compute on a CPU, and is copied to the layout of the weights.
    Here the weights come first. Its norms take three times as many operators, and its batch norm on
    a CUDA device refuses activations of 16 bits with statistics of 32. Here a norm is one over all
    clients.
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
    # In mixed precision a bias has 32 bits.
    return out if bias is None else out + bias.to(out.dtype)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Tensor:
    x = _Fold.apply(input, input, 1)
    mean = _fold(running_mean, input)
    var = _fold(running_var, input)
    affine = (_fold(weight, input), _fold(bias, input), *settings)
    out = F.batch_norm(x, mean, var, *affine, **named)
    return cast(Tensor, _Unfold.apply(out, input, 1))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Tensor:
    x = _Fold.apply(input, input, 1)
    affine = (_fold(weight, input), _fold(bias, input), *settings)
    out = F.group_norm(x, num_groups * x.shape[1] // input.shape[1], *affine, **named)
    return cast(Tensor, _Unfold.apply(out, input, 1))


def _fold(of_channels: Tensor | None, input: Tensor) -> Tensor | None:
    return None if of_channels is None else _Fold.apply(of_channels, input, 0)


class _Fold(torch.autograd.Function):
    """Takes stacked clients for further channels, in dimension ``dim`` of a client's tensor.

    So a norm is one over clients x channels. ``like`` is a tensor of each client.
    """

    @staticmethod
    def forward(x: Tensor, like: Tensor, dim: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.dim = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Unfold.apply(grad, *ctx.saved_tensors, ctx.dim), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, like: Tensor, dim: int) -> tuple[Tensor, None]:
        shared = in_dims[0] is None
        clients = x.expand(info.batch_size, *x.shape) if shared else x.movedim(in_dims[0], 0)
        return clients.movedim(0, dim).flatten(dim, dim + 1), None


class _Unfold(_Fold):
    """The inverse."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Fold.apply(grad, *ctx.saved_tensors, ctx.dim), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, like: Tensor, dim: int) -> tuple[Tensor, Any]:
        return x.unflatten(dim, (info.batch_size, -1)), dim


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
}
