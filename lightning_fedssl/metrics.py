"""Scalars of a round: weighted means and sums, gathered over the ranks once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fedssl.functional.device_copies import copy_to_cpu

Gather = Callable[[Any], list[Any]]
"""Gives every rank's value, in rank order, on every rank."""


class MetricCollector:
    """Weighted means of scalars. Values stay on their device until the means are computed at the end of a round.

    Values of a client are added when its update is accepted (:meth:`commit`), and are dropped when it is rejected
    (:meth:`discard`); all other values are added at once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float | Tensor] = {}
        self._waiting: dict[int, list[tuple[str, Tensor, float | Tensor]]] = {}

    def commit(self, client: int) -> None:
        """Add the values that a client has logged."""
        for name, value, weight in self._waiting.pop(client, []):
            self._add(name, value, weight)

    def discard(self, client: int) -> None:
        """Drop the values that a client has logged."""
        self._waiting.pop(client, None)

    def update(self, name: str, value: Any, weight: float | Tensor = 1.0, client: int | None = None) -> None:
        """Add one value to a weighted mean.

        Args:
            name: The scalar, e.g. ``client/loss``.
            value: A number or a tensor without dimensions.
            weight: E.g. the number of images that the value is a mean over. A tensor on the value's device avoids
                waiting for a number that was computed there.
            client: The client that the value belongs to, if any.
        """
        if client is None:
            self._add(name, _detached(value), weight)
        else:
            self._waiting.setdefault(client, []).append((name, _detached(value).clone(), weight))

    def _add(self, name: str, value: Tensor, weight: float | Tensor) -> None:
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

    def sums(self) -> dict[str, tuple[float, float]]:
        """The weighted sum and the weight of every scalar on this rank."""
        names, sums = list(self._sums), list(self._sums.values())
        weights = [torch.as_tensor(self._weights[name], dtype=torch.float64) for name in names]
        values = [float(value) for value in copy_to_cpu([*sums, *weights])]
        return {name: (values[i], values[len(names) + i]) for i, name in enumerate(names)}

    def compute(self, gather: Gather) -> dict[str, float]:
        """The means over all ranks; the collector is empty afterwards."""
        local = self.sums()
        self.__init__()  # type: ignore[misc]
        totals: dict[str, tuple[float, float]] = {}
        for part in gather(local):
            for name, (total, weight) in part.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + weight)
        return {name: total / weight for name, (total, weight) in totals.items() if weight > 0}


def _detached(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


class Counter:
    """Sums of a round, such as bytes, over all ranks."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Add to a sum."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def compute(self, gather: Gather) -> dict[str, float]:
        """The sums over all ranks; the counter is empty afterwards."""
        parts, self._counts = gather(self._counts), {}
        return {name: sum(part.get(name, 0.0) for part in parts) for name in sorted(set().union(*parts))}
