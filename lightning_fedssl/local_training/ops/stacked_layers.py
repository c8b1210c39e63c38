"""Layers of stacked clients for which the rules of ``vmap`` are slow.

Batch and group norm: ``vmap`` applies scale and shift outside of the kernel, which needs more kernels and stores more
activations for the backward pass. Here the clients become further channels. Channels (and groups of channels) are
normalised independently, so a tensor with ``clients * channels`` channels gives the same numbers in one kernel.

Linear layers: ``vmap`` multiplies the inputs by the transposed weights. So the gradient of the weights comes out
transposed, which is slow to compute on a CPU, and is copied to the layout of the weights. Here the weights come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C import _functorch as batching  # the public interface, autograd.Function.vmap, takes five times as long
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class StackedLayers(TorchFunctionMode):
    """Replaces ``F.batch_norm``, ``F.group_norm`` and ``F.linear`` inside ``vmap``; the results are the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        x = args[0] if args else None
        if func in _REPLACED and isinstance(x, Tensor) and batching.is_batchedtensor(x):
            return _REPLACED[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As ``F.batch_norm``. Statistics are reshaped without a copy, so that the kernel updates the stack in place."""
    if training and mean is not None and not _is_stacked(mean, x):
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)  # clients would share it
    statistics, affine = (_fold(mean, x), _fold(variance, x)), (_fold(weight, x), _fold(bias, x))
    return _unfold(F.batch_norm(_fold_channels(x), *statistics, *affine, training, momentum, eps), x)


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """As ``F.group_norm``."""
    return _unfold(F.group_norm(_fold_channels(x), _clients(x) * num_groups, _fold(weight, x), _fold(bias, x), eps), x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``F.linear``. With a weight that all clients share, one product of all their inputs is faster."""
    if x.dim() != 2 or not _is_stacked(weight, x):
        return F.linear(x, weight, bias)
    out = (weight @ x.mT).mT
    return out if bias is None else out + bias.to(out.dtype)  # in mixed precision a bias has 32 bits


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.linear: _linear,
}


def _clients(x: Tensor) -> int:
    return batching.get_unwrapped(x).shape[batching.maybe_get_bdim(x)]


def _fold_channels(x: Tensor) -> Tensor:
    """``(batch, clients * channels, ...)``; no copy after a stacked convolution, whose output has this layout."""
    return batching.get_unwrapped(x).movedim(batching.maybe_get_bdim(x), 1).flatten(1, 2)


def _unfold(out: Tensor, x: Tensor) -> Tensor:
    """The result as ``vmap`` sees it: ``(batch, channels, ...)`` of each client."""
    return batching._add_batch_dim(out.unflatten(1, (_clients(x), -1)), 1, batching.maybe_get_level(x))


def _fold(values: Tensor | None, x: Tensor) -> Tensor | None:
    """One value per channel, ``(channels,)`` of each client, as ``(clients * channels,)``."""
    if values is None:
        return None
    if _is_stacked(values, x):
        return batching.get_unwrapped(values).movedim(batching.maybe_get_bdim(values), 0).flatten()
    return values.repeat(_clients(x))


def _is_stacked(values: Tensor, x: Tensor) -> bool:
    return bool(batching.is_batchedtensor(values) and batching.maybe_get_level(values) == batching.maybe_get_level(x))
