"""CUDA graphs of the pretend device.

A capture notes every operation; what it wrote to memory from before the capture is taken back. A replay repeats the
operations: on the same storages where these are older than the capture, on new ones where the graph allocated them, as
nothing that a graph allocates outlives a replay.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretend_cuda import device
from tests.pretend_cuda.device import PretendCudaError, PretendTensor, fill_with_garbage


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: a storage's serial number, and the view of it."""

    serial: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Operation:
    """An operation of a graph; its tensors are places, or copies of numbers of the host's."""

    run: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[_Place]


class CudaGraph:
    """As :class:`torch.cuda.CUDAGraph`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations: list[_Operation] = []
        self.kernels = 0
        self.inputs: dict[int, tuple[Any, str]] = {}  # serial number: weak reference and the line that read it first
        self.own: dict[int, Any] = {}  # serial number: weak reference
        self._before: list[tuple[Any, Any]] = []  # storages and what they held

    # The capture.

    def read(self, tensors: Sequence[Tensor]) -> None:
        """An operation is about to read or write these."""
        for tensor in tensors:
            storage: Any = tensor.value.untyped_storage() if isinstance(tensor, PretendTensor) else None
            if storage is not None and storage.serial not in self.own and storage.serial not in self.inputs:
                self.inputs[storage.serial] = weakref.ref(storage), device.line_of_own_code()
                self._before.append((storage, storage.clone()))

    def note(self, run: Any, args: Any, kwargs: Any, result: Any, no_kernel: bool, is_view: bool) -> None:
        """An operation has been made."""
        results = list(device._tensors([result]))
        for tensor in results:
            storage: Any = tensor.untyped_storage()
            if storage.serial not in self.inputs:
                self.own.setdefault(storage.serial, weakref.ref(storage))
        self.kernels += not no_kernel
        if not is_view:  # places say which part of a storage they are
            kept = {key: _placed(value) for key, value in kwargs.items()}
            self.operations.append(_Operation(run, _placed(args), kept, [_place(t) for t in results]))

    def end(self) -> None:
        """The capture ends; it has launched nothing."""
        for storage, content in self._before:
            storage.copy_(content)
        self._before.clear()
        self._forget()
        device.current.graphs.append(self.kernels)
        device.current.captured(self)

    def _forget(self) -> None:
        """Other graphs of the pool may overwrite what this one allocated."""
        for reference in self.own.values():
            if (storage := reference()) is not None:
                fill_with_garbage(torch.empty(0).set_(storage))

    # Replays.

    def replay(self) -> None:
        """Repeat the operations."""
        device.current.replays += 1
        with torch.no_grad(), _disable_current_modes():
            allocated: dict[int, Any] = {}
            for operation in self.operations:
                args = self._tensors(operation.args, allocated)
                kwargs = {key: self._tensors(value, allocated) for key, value in operation.kwargs.items()}
                for tensor, place in zip(
                    device._tensors([operation.run(*args, **kwargs)]), operation.results, strict=True
                ):
                    if place.serial in self.own and place.serial not in allocated:
                        allocated[place.serial] = tensor.untyped_storage()
        self._forget()

    def _tensors(self, argument: Any, allocated: dict[int, Any]) -> Any:
        if isinstance(argument, _Place):
            storage = allocated.get(argument.serial)
            if storage is None:
                reference, line = self.inputs[argument.serial]
                if (storage := reference()) is None:
                    raise PretendCudaError(f"a graph reads memory that was freed after its capture @ {line}")
            return torch.empty(0, dtype=argument.dtype).set_(storage, argument.offset, argument.shape, argument.stride)
        if isinstance(argument, list):
            return [self._tensors(item, allocated) for item in argument]
        return argument

    def pool(self) -> tuple[int, int]:
        """As the only pool there is."""
        return 0, 1


def _placed(argument: Any) -> Any:
    """The argument with places instead of the device's tensors, and copies of the host's numbers."""
    if isinstance(argument, Tensor):
        on_device = hasattr(argument.untyped_storage(), "serial")
        return _place(argument) if on_device else argument.clone()
    return [_placed(item) for item in argument] if isinstance(argument, list) else argument


def _place(tensor: Tensor) -> _Place:
    storage: Any = tensor.untyped_storage()
    return _Place(storage.serial, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@contextlib.contextmanager
def capturing(graph: CudaGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    """As :class:`torch.cuda.graph`."""
    gc.collect()
    now = device.current
    peak, reserved = now.peak, now.reserved
    now.peak = now.before_capture = now.allocated
    now.capture = graph
    try:
        yield
        now.capture = None
        with torch.no_grad(), _disable_current_modes():
            graph.end()
    finally:
        now.capture, now.peak = None, max(peak, now.peak)
        now.reserved = max(reserved, now.allocated)  # what the capture had in use is the graphs' memory now
