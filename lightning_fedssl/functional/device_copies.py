"""Copies from a device to the CPU for which the host waits once, and not once for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedssl.functional.averaging import State


def copy_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors on the CPU, in order.

    Args:
        tensors: Tensors of any device, type and shape.
    """
    copies = [t.detach().to("cpu", non_blocking=t.is_cuda, copy=True) for t in tensors]
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def on_cpu(state: State) -> State:
    """Copies of a state's tensors on the CPU."""
    return dict(zip(state, copy_to_cpu(list(state.values())), strict=True))
