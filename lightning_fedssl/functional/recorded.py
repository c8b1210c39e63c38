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

from lightning_fedssl.functional.dictionaries import map_values

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
    graph uses the memory of its first run. It lives as long as this object, or until
    :meth:`keep_while` is called with another key. What cannot be recorded is called as it is, after
    one warning. ``FEDSSL_RECORD=0`` records nothing.

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
        self.key: object = None
        self.calls: Counter[object] = Counter()
        self.graphs: dict[object, tuple[torch.cuda.CUDAGraph, list[Tensor], Values]] = {}

    def keep_while(self, key: object) -> None:
        """Forget all recordings that were made under another key.

        Args:
            key: What the function reads in addition to its arguments and to tensors that do not
                move, such as a number that is set for a round.
        """
        if key != self.key:
            self.key = key
            self.calls.clear()
            self.graphs.clear()

    def __call__(self, inputs: dict[str, Tensor], number: int | Tensor) -> Values:
        """What the function returns; the tensors are the caller's.

        Args:
            inputs: Tensors by name. A function of a tensor on the host is not recorded.
            number: The number of the call; a recorded function gets it as a tensor, ``()``, or as
                the tensor that is given here.
        """
        device = next(iter(inputs.values())).device
        if not self.records or any(t.device.type != "cuda" for t in inputs.values()):
            return self.function(inputs, number)
        shapes = tuple((name, t.shape, t.dtype) for name, t in inputs.items())
        count = number if isinstance(number, Tensor) else torch.full((), number, device=device)
        self.calls[shapes] += 1
        if self.calls[shapes] < FIRST:
            return self.function(inputs, count)
        if self.calls[shapes] == FIRST:
            return self._watched(inputs, count)
        if shapes not in self.graphs:
            if not _has_room(device):
                return self.function(inputs, count)
            try:
                self.graphs[shapes] = self._record(inputs, count)
            except Exception as error:
                self.give_up(str(error) or type(error).__name__)
                return self.function(inputs, number)
        graph, static_inputs, values = self.graphs[shapes]
        torch._foreach_copy_(static_inputs, [*inputs.values(), count])
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
        for warning in caught:
            if self.records and "synchronizing CUDA operation" in str(warning.message):
                self.give_up(f"it reads a value of the GPU ({warning.filename}:{warning.lineno})")
        return values

    def _record(
        self, inputs: dict[str, Tensor], count: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Values]:
        """The graph, the tensors that it reads, and those that it writes."""
        device = count.device
        static_inputs = map_values(Tensor.clone, inputs)
        count = count.clone()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                values = self.function(static_inputs, count)
            finally:
                graph.capture_end()
        return graph, [*static_inputs.values(), count], values

    def give_up(self, reason: str) -> None:
        """Record no more, here and in other objects for this function, after one warning.

        Args:
            reason: Why.
        """
        _log.warning(
            "%s is not recorded as a CUDA graph, so it runs operator by operator: %s",
            self.what, reason.splitlines()[0],
        )  # fmt: skip
        self.records = False
        _refused.add(self.what)


def _has_room(device: torch.device) -> bool:
    """Whether a quarter of the device's memory is free, so that a further graph can keep its own.

    If not, the memory of earlier graphs is given back first, which no other graph could use.
    """
    free, total = torch.cuda.mem_get_info(device)
    if 4 * free < total:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    return 4 * free >= total
