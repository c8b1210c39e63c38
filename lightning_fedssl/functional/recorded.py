"""A function of tensors recorded as a CUDA graph.

For the small networks of the papers a GPU waits for the host, which launches some hundred operators
a step one by one. A graph launches them at once.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fedssl.functional.by_name import mapped

_log = logging.getLogger(__name__)

Values = list[tuple[Tensor, str, float]]
"""Tensors, each with a name and a number, which are the same in all calls with the same shapes."""

Function = Callable[[dict[str, Tensor], "int | Tensor"], Values]
"""Takes tensors by name, and the number of the call."""

FIRST = 2
"""Calls of one shape before it is recorded: libraries choose kernels, an optimizer makes states."""


_refused: set[str] = set()
"""What could not be recorded; it is not tried again."""


class Recorded:
    """Calls a function, on a CUDA device as a graph from the third call with the same shapes on.

    The function may change tensors in place, such as weights. It must not read a number from the
    device, replace the tensors that it changes, or depend on what else changes between calls: the
    graph uses the memory of its first run. It lives as long as this object, which is made for one
    party's work. What cannot be recorded is called as it is, after one warning. ``FEDSSL_RECORD=0``
    records nothing.

    Args:
        function: The function.
        what: Its name in the warning, which is given once.
        possible: False: the function changes more between calls than its arguments.

    Attributes:
        records: Whether calls are recorded.
    """

    def __init__(self, function: Function, what: str, possible: bool = True) -> None:
        self.function = function
        self.what = what
        self.records = possible and what not in _refused and os.environ.get("FEDSSL_RECORD") != "0"
        self.calls: Counter[object] = Counter()
        self.graphs: dict[object, tuple[torch.cuda.CUDAGraph, list[Tensor], Values]] = {}

    def __call__(self, inputs: dict[str, Tensor], number: int) -> Values:
        """What the function returns; the tensors are the caller's.

        Args:
            inputs: Tensors by name. A function of a tensor on the host is not recorded.
            number: The number of the call; a recorded function gets it as a tensor, ``()``.
        """
        device = next(iter(inputs.values())).device
        if not self.records or any(t.device.type != "cuda" for t in inputs.values()):
            return self.function(inputs, number)
        shapes = tuple((name, t.shape, t.dtype) for name, t in inputs.items())
        count = torch.full((), number, device=device)
        self.calls[shapes] += 1
        if self.calls[shapes] < FIRST:
            return self.function(inputs, count)
        if self.calls[shapes] == FIRST:
            return self._watched(inputs, count)
        if shapes not in self.graphs:
            try:
                self.graphs[shapes] = self._record(inputs, count)
            except Exception as error:
                self._give_up(str(error) or type(error).__name__)
                return self.function(inputs, number)
        graph, own, values = self.graphs[shapes]
        torch._foreach_copy_(own, [*inputs.values(), count])
        graph.replay()
        copies = [torch.empty_like(tensor) for tensor, *_ in values]
        torch._foreach_copy_(copies, [tensor for tensor, *_ in values])
        return [(copy, name, x) for copy, (_, name, x) in zip(copies, values, strict=True)]

    def _watched(self, inputs: dict[str, Tensor], count: Tensor) -> Values:
        """Call the function, and find out whether the host waits for the device, which a recording
        could not do.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                values = self.function(inputs, count)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for found in caught:
            if self.records and "synchronizing CUDA operation" in str(found.message):
                self._give_up(f"it reads a value of the GPU ({found.filename}:{found.lineno})")
        return values

    def _record(
        self, inputs: dict[str, Tensor], count: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Values]:
        """The graph, the tensors that it reads, and those that it writes."""
        device = count.device
        if torch.cuda.memory_reserved(device) > 3 * torch.cuda.max_memory_allocated(device):
            torch.cuda.empty_cache()  # of earlier graphs, which other processes could not use
        own = mapped(Tensor.clone, inputs)
        count = count.clone()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                values = self.function(own, count)
            finally:
                graph.capture_end()
        return graph, [*own.values(), count], values

    def _give_up(self, reason: str) -> None:
        _log.warning(
            "%s is not recorded as a CUDA graph, so it runs operator by operator: %s",
            self.what, reason.splitlines()[0],
        )  # fmt: skip
        self.records = False
        _refused.add(self.what)
