"""The backward pass with little Python overhead.

``loss.backward()`` takes 25 microseconds before torch's engine starts, because it supports several losses, subclasses
of tensors and given gradients. A training loss is one number, for which the engine is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import DoublePrecision, MixedPrecision, Precision
from torch import Tensor

_engine: Any = torch.autograd.Variable._execution_engine


def backward_of(fabric: Fabric) -> Callable[[Tensor], None]:
    """A function that accumulates the gradients of a loss; bitwise identical to ``fabric.backward``.

    Args:
        fabric: On other devices than a CPU, or with a precision that scales the loss, its own method is returned.
    """
    precision = fabric.strategy.precision
    scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
    known = type(precision) in (Precision, MixedPrecision, DoublePrecision) and not scaled
    return _Backward(fabric) if known and fabric.device.type == "cpu" else fabric.backward


class _Backward:
    """Call the engine for a loss without dimensions."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.one = torch.ones(())

    def __call__(self, loss: Tensor) -> None:
        if type(loss) is not Tensor or loss.dim():
            self.fabric.backward(loss)
            return
        if self.one.dtype is not loss.dtype:
            self.one = torch.ones_like(loss, requires_grad=False)
        keep_graph, create_graph = False, False
        _engine.run_backward(
            (loss,), (self.one,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
        )
