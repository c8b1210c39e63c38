"""Copies from a device to the CPU for which the host waits once, and not once for each tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors on the CPU, in order.

    Tensors of a CUDA device are joined by type and copied at once; the host waits for the device once for all of them.

    Args:
        tensors: Tensors of any device, type and shape.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cuda":
            groups[tensor.device, tensor.dtype].append(index)
    joined = {
        place: torch.cat([tensors[index].detach().flatten() for index in group]).to("cpu", non_blocking=True)
        for place, group in groups.items()
    }
    for device in {device for device, _ in groups}:
        torch.cuda.current_stream(device).synchronize()
    copies: dict[int, Tensor] = {}
    for place, group in groups.items():
        parts = joined[place].split([tensors[index].numel() for index in group])
        copies |= {index: part.reshape(tensors[index].shape).clone() for index, part in zip(group, parts, strict=True)}
    return [
        copies[index] if index in copies else tensor.detach().to("cpu", copy=True)
        for index, tensor in enumerate(tensors)
    ]


def tree_on_cpu(value: Any) -> Any:
    """The same dictionaries and lists with tensors on the CPU; a tensor that appears twice is copied once.

    Args:
        value: Tensors and plain values in dictionaries, lists and tuples. Without tensors of a CUDA device it is
            returned as it is.
    """
    found: dict[int, Tensor] = {}
    _collect(value, found)
    copies = dict(zip(found, copy_to_cpu(list(found.values())), strict=True))
    return _replaced(value, copies) if copies else value


def _collect(value: Any, found: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.device.type == "cuda":
            found[id(value)] = value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _collect(part, found)


def _replaced(value: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(part, copies) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(part, copies) for part in value)
    return copies.get(id(value), value)
