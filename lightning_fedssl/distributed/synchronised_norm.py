"""Batch norm over the rows of all ranks: the statistics, and their gradients, are those of the whole batch.

torch's ``SyncBatchNorm`` needs a GPU. This one runs on every device. Each layer communicates twice in a step: moments
in the forward pass, and two sums a channel in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl.distributed import collectives
from lightning_fedssl.functional.batch_norm import batch_norm_layers


@contextmanager
def synchronised_batch_norm(network: nn.Module, fabric: Fabric) -> Iterator[None]:
    """Inside the context, batch-norm layers in training mode normalise with the statistics of all ranks' rows.

    Every rank must make the same forward and backward passes, each with one row or more.

    Args:
        network: The network; its layers' running statistics become those of the whole batch.
        fabric: The ranks.
    """
    layers = list(batch_norm_layers(network).values())
    for layer in layers:
        layer.forward = partial(_forward, layer, fabric)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: _BatchNorm, fabric: Fabric, x: Tensor) -> Tensor:
    """A batch-norm layer's forward pass."""
    if not layer.training:
        return type(layer).forward(layer, x)
    like = torch.empty((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    scale = like.new_ones(x.shape[1]) if layer.weight is None else layer.weight
    shift = like.new_zeros(x.shape[1]) if layer.bias is None else layer.bias
    out, mean, variance, count = _Normalise.apply(x, scale, shift, layer.eps, fabric)
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        new = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), new)
        layer.running_var.lerp_((variance * count / (count - 1)).to(layer.running_var.dtype), new)
    return cast(Tensor, out)


def _moments(x: Tensor, fabric: Fabric) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance ``(channels,)`` over the values of all ranks, and their number."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)  # a third of the time of torch.var_mean
    own = torch.cat([mean.new_tensor([x.numel() // x.shape[1]]), mean, variance])
    counts, means, variances = collectives.stack_rows(fabric, own).split([1, len(mean), len(mean)], dim=1)
    count = counts.sum()
    total = (counts * means).sum(0) / count
    return total, (counts * (variances + (means - total) ** 2)).sum(0) / count, count


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * scale + shift``, with mean and variance of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float, fabric: Fabric) -> Any:
        mean, variance, count = _moments(x, fabric)
        ctx.save_for_backward(x, scale, mean, variance, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, scale, shift, training=False, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        """With x' the normalised x: ``dx = scale / sigma (dy - sum(dy) / n - x' sum(dy x') / n)``, sums over all."""
        x, scale, mean, variance, count = ctx.saved_tensors
        grad, x, inverse = grad.contiguous(), x.contiguous(), (variance + ctx.eps).rsqrt()
        # With fixed statistics, torch's kernel computes sum(dy x') and sum(dy); its dx would take a second pass.
        _, d_scale, d_shift = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, mean, variance, mean, inverse, False, ctx.eps, [False, True, True]
        )
        all_scale, all_shift = collectives.add_up(torch.cat([d_scale, d_shift])).split(len(mean))
        factor = scale * inverse
        slope = -factor * inverse * all_scale / count
        dx = _affine(grad, factor, -factor * all_shift / count - slope * mean).add_(_affine(x, slope))
        return dx, d_scale, d_shift, None, None


def _affine(x: Tensor, slope: Tensor, offset: Tensor | None = None) -> Tensor:
    """``slope x + offset`` by channel, as a batch norm with mean 0 and variance 1: faster than broadcast tensors."""
    return F.batch_norm(x, torch.zeros_like(slope), torch.ones_like(slope), slope, offset, training=False, eps=0.0)
