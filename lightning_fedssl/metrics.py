"""Scalars of a round: weighted means and sums, gathered over the ranks once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Any], list[Any]]
"""Gives every rank's value, in rank order, on every rank."""


class MetricCollector:
    """Collects scalars without reading the device; they are read when the round's result is computed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float | Tensor] = {}

    def update(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add one value to a weighted mean.

        Args:
            name: The scalar, e.g. ``client/loss``.
            value: A number or a tensor without dimensions.
            weight: E.g. the number of images that the value is a mean over; a tensor, on the value's device, where the
                number is known there alone.
        """
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        if name not in self._sums:
            self._sums[name] = value.double() * weight
        elif isinstance(weight, Tensor):
            self._sums[name].addcmul_(value, weight)
        else:
            self._sums[name].add_(value.to(self._sums[name].device), alpha=weight)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def weight(self, name: str) -> float:
        """The weight collected so far on this rank; 0 if there is none."""
        return float(self._weights.get(name, 0.0))

    def compute(self, gather: Gather) -> dict[str, float]:
        """The means over all ranks, and a fresh start."""
        local = {name: (float(total), self.weight(name)) for name, total in self._sums.items()}
        self.__init__()  # type: ignore[misc]
        totals: dict[str, tuple[float, float]] = {}
        for part in gather(local):
            for name, (total, weight) in part.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + weight)
        return {name: total / weight for name, (total, weight) in totals.items() if weight > 0}


class Counter:
    """Sums of a round that are no means, such as bytes; gathered over the ranks like :class:`MetricCollector`."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Add to a sum."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def compute(self, gather: Gather) -> dict[str, float]:
        """The sums over all ranks, and a fresh start."""
        parts, self._counts = gather(self._counts), {}
        return {name: sum(part.get(name, 0.0) for part in parts) for name in sorted(set().union(*parts))}
