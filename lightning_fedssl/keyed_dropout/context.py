"""Dropout whose masks are a function of (seed, round, party, step, call, position), not of a generator's state.

So a client drops the same values in sequential and stacked training, on CPU and GPU, on one and on several ranks.
Networks need no special layer: inside the context, the functions of ``torch.nn.functional`` use these masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from lightning_fedssl import sampling
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.keyed_dropout.code_search import mentions_dropout
from lightning_fedssl.state import Batch

StepLoss = Callable[[Batch, int], "Tensor | None"]


class KeyedDropout(TorchFunctionMode):
    """Inside this context ``F.dropout`` and ``F.dropout1d`` to ``F.dropout3d`` draw from a key.

    Args:
        key: The key of a client's step, int64 without dimensions.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _MASK_SHAPES:
            return func(*args, **(kwargs or {}))
        return self._drop(_MASK_SHAPES[func], *args, **(kwargs or {}))

    def _drop(
        self,
        mask_shape: Callable[[Sequence[int]], list[int]],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.calls += training
        if not training or p == 0:
            return input
        shape = mask_shape(input.shape)
        key = sampling.fold_in(self.key, self.calls)
        rows = torch.arange(_first_row, _first_row + shape[0], device=key.device)
        uniform = sampling.uniform(sampling.fold_in(key, rows), _size(shape[1:]))
        factors = (uniform >= p).to(input.dtype).reshape(shape) / max(1 - p, 1e-30)
        return input.mul_(factors) if inplace else input * factors


_first_row = 0


@contextmanager
def rows_from(first: int) -> Iterator[None]:
    """Inside the context, inputs are rows of a larger batch, from row ``first`` on, and get the masks of these rows."""
    global _first_row
    before, _first_row = _first_row, first
    try:
        yield
    finally:
        _first_row = before


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _channels(dimensions: int) -> Callable[[Sequence[int]], list[int]]:
    """The shape of one value per channel, for inputs of this number of dimensions, or one less (no batch)."""

    def shape(of: Sequence[int]) -> list[int]:
        kept = 2 if len(of) == dimensions else 1
        return [*of[:kept], *[1] * (len(of) - kept)]

    return shape


_MASK_SHAPES: dict[Any, Callable[[Sequence[int]], list[int]]] = {
    F.dropout: list,
    F.dropout1d: _channels(3),
    F.dropout2d: lambda shape: [*shape[:2], *[1] * (len(shape) - 2)],  # three dimensions are (batch, channels, length)
    F.dropout3d: _channels(5),
}


def key_of(data: LocalData) -> int:
    """The key of a party's training in a round."""
    return sampling.derive_key(data.seed, "dropout", data.round, data.party)


_without_dropout: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def known_without(algorithm: nn.Module) -> bool:
    """Whether an algorithm has no layer of dropout, and its code names no function of dropout.

    The context costs 2 us per function call, so such algorithms train without it. The answer is read from the layers
    and the code, not from what the steps do: it must be the same on every rank, and in a run that is resumed. Dropout
    that is not found, because it is called by code that the search does not reach, draws from torch's generator.
    """
    if algorithm not in _without_dropout:
        has_layer = any(isinstance(layer, _DropoutNd) for layer in algorithm.modules())
        _without_dropout[algorithm] = not has_layer and not mentions_dropout(algorithm)
    return _without_dropout[algorithm]


def drawing(
    algorithm: nn.Module, device: torch.device, step: int, seed: int, *purpose: int | str
) -> AbstractContextManager[object]:
    """A context in which dropout draws from a key, for work that is no training step; empty without dropout.

    Args:
        algorithm: The module whose code runs inside the context.
        device: Where the masks are computed.
        step: The number of the batch.
        seed: The run's seed.
        purpose: What the work is, as in :func:`~lightning_fedssl.sampling.derive_key`.
    """
    if known_without(algorithm):
        return nullcontext()
    return KeyedDropout(sampling.fold_in(torch.tensor(sampling.derive_key(seed, *purpose)).to(device), step))


def keyed(algorithm: nn.Module, data: LocalData, step_loss: StepLoss) -> StepLoss:
    """A loss whose dropout draws from a party's key; the loss itself if the algorithm has no dropout.

    Args:
        algorithm: The module that the loss belongs to.
        data: The party's data.
        step_loss: A method of the algorithm.
    """
    if known_without(algorithm):
        return step_loss
    key = torch.tensor(key_of(data)).to(data.images.device, non_blocking=True)

    def loss(batch: Batch, step: int) -> Tensor | None:
        with KeyedDropout(sampling.fold_in(key, step)):
            return step_loss(batch, step)

    return loss
