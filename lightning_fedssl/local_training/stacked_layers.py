"""Layers of stacked clients for which the rule of ``vmap`` is slow, or fails in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class StackedLayers(TorchFunctionMode):
    """Replaces ``F.linear`` and ``F.batch_norm`` inside ``vmap``.

    The results are the same up to rounding.

    ``vmap`` multiplies the inputs by the transposed weights. So the gradient of the weights comes
    out transposed, which is slow to compute on a CPU, and is copied to the layout of the weights.
    Here the weights come first. Its batch norm takes three times as many operators, and on a CUDA
    device refuses activations of 16 bits with statistics of 32. Here it is one over all clients.
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
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    per_channel = (weight, bias, running_mean, running_var)
    out, *_ = _FoldedBatchNorm.apply(input, *per_channel, training, momentum, eps)
    return cast(Tensor, out)


class _FoldedBatchNorm(torch.autograd.Function):
    """Batch norm whose rule for ``vmap`` is one batch norm over clients x channels.

    The rule of PyTorch's own normalises without weight and bias, and applies them by operators of
    their own.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, ...]:
        running = (running_mean, running_var)
        return torch.native_batch_norm(x, weight, bias, *running, *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, *running, training, _, eps = inputs
        ctx.settings = (training, eps, [True, weight is not None, bias is not None])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        # Training changes the running statistics, and reads them no more.
        ctx.save_for_backward(x, weight, *((None, None) if training else running), *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        settings = (*ctx.saved_tensors, *ctx.settings)
        gradients = torch.ops.aten.native_batch_norm_backward(grad, *settings)
        return *gradients, *[None] * 5

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Any) -> Any:
        *per_channel, training, momentum, eps = others
        weight, bias, *running = (
            None if t is None else _clients_first(t, dim, info.batch_size)
            for t, dim in zip(per_channel, in_dims[1:], strict=False)
        )
        folded = [None if t is None else t.flatten() for t in (weight, bias)]
        folded += [None if t is None else t.view(-1) for t in running]  # changed in place
        x = _clients_first(x, in_dims[0], info.batch_size).transpose(0, 1).flatten(1, 2)
        out, *saved = _FoldedBatchNorm.apply(x, *folded, training, momentum, eps)
        saved = [t.unflatten(0, (info.batch_size, -1)) if training else t for t in saved]
        return (out.unflatten(1, (info.batch_size, -1)), *saved), (
            1,
            *[0 if training else None] * 2,
        )


def _clients_first(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    """A tensor ``(clients, ...)``; one without that dimension is the same for all clients."""
    return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.batch_norm: _batch_norm,
}
