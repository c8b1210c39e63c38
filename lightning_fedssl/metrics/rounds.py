"""Scalars of a round: weighted means and sums, gathered over the ranks once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fedssl.functional.device_copies import copy_to_cpu
from lightning_fedssl.functional.dictionaries import starting_with

Metrics = dict[str, float]
"""Scalars by name."""

Gather = Callable[[Any], list[Any]]
"""Gives every rank's value, in rank order, on every rank."""


class Logged(NamedTuple):
    """A value that a method or a callback has logged.

    Attributes:
        name: The scalar.
        value: A number, or a tensor without dimensions.
        weight: Its weight in the mean of the round: a number, or such a tensor.
        client: The client that it belongs to, if any.
    """

    name: str
    value: Any
    weight: Any = 1.0
    client: int | None = None


_Entry = tuple[str, Tensor, "float | Tensor"]
"""A scalar's name, one value of it, and the weight of the value."""


class Share(NamedTuple):
    """What one rank has collected.

    Attributes:
        sums: The weighted sum and the weight of every scalar, of values that belong to no client.
        of_clients: The values of accepted clients: the client, and its values in the order in which
            it logged them.
    """

    sums: dict[str, tuple[float, float]]
    of_clients: list[tuple[int, list[tuple[str, float, float, bool]]]]


class MetricCollector:
    """Weighted means of scalars. Values stay on their device until the means are computed at the
    end of a round.

    Values of a client are added when its update is accepted (:meth:`commit`), and are dropped when
    it is rejected (:meth:`discard`); all other values are added at once. With several ranks the
    values of accepted clients wait until the means are computed: all ranks' values are then added
    in one order, which does not depend on the ranks.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float | Tensor] = {}
        self._waiting: dict[int, list[_Entry]] = {}
        self._accepted: list[tuple[int, list[_Entry]]] = []

    def commit(self, client: int) -> None:
        """Add the values that a client has logged."""
        entries = self._waiting.pop(client, [])
        if self._ranks > 1:
            self._accepted.append((client, entries))
            return
        for entry in entries:
            self._add(*entry)

    def discard(self, client: int) -> None:
        """Drop the values that a client has logged."""
        self._waiting.pop(client, None)

    def update(
        self, name: str, value: Any, weight: float | Tensor = 1.0, client: int | None = None
    ) -> None:
        """Add one value to a weighted mean.

        Args:
            name: The scalar, e.g. ``client/loss``.
            value: A number or a tensor without dimensions.
            weight: E.g. the number of images that the value is a mean over; a value of weight 0 may
                be NaN and does not count. A tensor on the value's device avoids waiting for a
                number that was computed there.
            client: The client that the value belongs to, if any.
        """
        if not isinstance(weight, Tensor) and weight == 0:
            return
        if client is None:
            self._add(name, _detached(value), weight)
        else:
            self._waiting.setdefault(client, []).append((name, _detached(value).clone(), weight))

    def _add(self, name: str, value: Tensor, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            value = torch.where(weight == 0, 0.0, value)
        if name not in self._sums:
            self._sums[name] = value.double() * weight
        elif isinstance(weight, Tensor):
            self._sums[name].addcmul_(value, weight)
        else:
            self._sums[name].add_(value.to(self._sums[name].device), alpha=weight)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def weight(self, name: str) -> float:
        """The weight collected so far on this rank; 0 if there is none."""
        total = float(self._weights.get(name, 0.0))
        for _, entries in self._accepted:
            for entry_name, _, weight in entries:
                total += float(weight) if entry_name == name else 0.0
        return total

    def sums(self) -> dict[str, tuple[float, float]]:
        """The weighted sum and the weight of every scalar on this rank."""
        weights = [torch.as_tensor(self._weights[name], dtype=torch.float64) for name in self._sums]
        values = list(map(float, copy_to_cpu([*self._sums.values(), *weights])))
        pairs = zip(values[: len(weights)], values[len(weights) :], strict=True)
        return dict(zip(self._sums, pairs, strict=True))

    def take(self) -> Share:
        """What this rank has collected; the collector is empty afterwards."""
        values = iter(
            copy_to_cpu([value for _, logged in self._accepted for _, value, _ in logged])
        )
        share = Share(self.sums(), [])
        for client, entries in self._accepted:
            numbers = []
            for name, _, weight in entries:
                is_tensor = isinstance(weight, Tensor)
                numbers.append((name, float(next(values)), float(weight), is_tensor))
            share.of_clients.append((client, numbers))
        self.__init__(self._ranks)  # type: ignore[misc]
        return share

    def compute(self, gather: Gather, order: Sequence[int] = ()) -> Metrics:
        """The means over all ranks; the collector is empty afterwards.

        Args:
            gather: Gives every rank's value.
            order: See :func:`means_of`.
        """
        return means_of(gather(self.take()), order)


def means_of(shares: Sequence[Share], order: Sequence[int] = ()) -> Metrics:
    """The means of the scalars that all ranks have collected.

    The values of clients are added one after another, as a single rank adds them. Other scalars of
    which all ranks have the same sum, such as the loss of a server that every rank trains, are
    taken once.

    Args:
        shares: What each rank has collected.
        order: The clients in the order in which their values are added; ascending numbers if left
            out.
    """
    place = {name: index for index, name in enumerate(order)}
    of_clients = list(chain(*(share.of_clients for share in shares)))
    collector = MetricCollector()
    for _, entries in sorted(of_clients, key=lambda one: place.get(one[0], one[0])):
        for name, value, weight, is_tensor in entries:
            collector._add(name, _detached(value), _detached(weight) if is_tensor else weight)
    totals = collector.sums()
    for name in dict.fromkeys(chain(*(share.sums for share in shares))):
        pairs = [share.sums[name] for share in shares if name in share.sums]
        repeated = len(pairs) == len(shares) and all(pair == pairs[0] for pair in pairs)
        for total, weight in pairs[:1] if repeated else pairs:
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + total, before[1] + weight)
    return {name: total / weight for name, (total, weight) in totals.items() if weight > 0}


def as_tensors(metrics: Mapping[str, float]) -> dict[str, Tensor]:
    """Scalars as Lightning's callbacks expect them."""
    return {name: _detached(value) for name, value in metrics.items()}


def _detached(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64)


def totals_of(counts: Sequence[Metrics]) -> Metrics:
    """The sums over all ranks.

    Args:
        counts: The sums of each rank.
    """
    totals = defaultdict[str, float](float)
    for part in counts:
        for name, amount in part.items():
            totals[name] += amount
    return dict(sorted(totals.items()))


class Scalars:
    """The scalars of a run: what the present round collects, and the last value of each.

    Attributes:
        logged: What was logged and is not yet added, in the order in which it was logged; the
            method's ``algorithm.logged``.
        last: The last value of every scalar, by name.
        metrics: The last value of every evaluation metric, by name, such as the matrix
            ``val/confusion_matrix``.
        rounds: The round of the model that ``val`` and ``test`` have evaluated last.
        total_bytes: Bytes that clients received and sent in all rounds.
    """

    def __init__(self) -> None:
        self.reset()
        self.begin([])

    def reset(self) -> None:
        """Forget the values of an earlier run."""
        self.last: dict[str, Tensor] = {}
        self.metrics: dict[str, Tensor] = {}
        self.rounds: dict[str, int] = {}
        self.total_bytes = 0.0

    def begin(self, logged: list[Logged], ranks: int = 1) -> None:
        """Begin a command, with nothing collected.

        Args:
            logged: The list that the method of the command logs to.
            ranks: Number of ranks.
        """
        logged.clear()
        self.logged = logged
        self._means = MetricCollector(ranks)
        self._sums = defaultdict[str, float](float)

    # Of the present round.

    def count(self, amounts: Mapping[str, float]) -> None:
        """Add to sums of the round over all ranks, by their names, such as bytes."""
        for name, amount in amounts.items():
            self._sums[name] += amount

    def accept(self, client: int) -> None:
        """Count what a client has logged: its update is accepted, or it skips the round."""
        self.add_logged()
        self._means.commit(client)

    def reject(self, client: int) -> None:
        """Drop what a client has logged."""
        self.add_logged()
        self._means.discard(client)

    def weight(self, name: str) -> float:
        """The weight of a mean so far, on this rank."""
        self.add_logged()
        return self._means.weight(name)

    def end_round(
        self, gather: Gather, order: Sequence[int], seconds: float
    ) -> tuple[Metrics, Metrics]:
        """The scalars of the round over all ranks, and the bytes among them.

        Args:
            gather: Gives every rank's value.
            order: See :func:`means_of`.
            seconds: The duration of the round on this rank.
        """
        self.add_logged()
        parts = gather((self._means.take(), self._sums, seconds))
        shares, sums, durations = zip(*parts, strict=True)
        counts = totals_of(sums)
        metrics = means_of(shares, order) | counts
        sent = self._take_bytes(counts)
        if self.total_bytes:
            metrics["communication/total_bytes"] = self.total_bytes
        metrics["time/round_s"] = max(durations)
        return metrics, sent

    def bytes_of_test(self, gather: Gather, before: Metrics | None) -> Metrics:
        """The scalars of communication with what clients sent and received for the test; empty if
        they sent nothing.

        They do if statistics of static batch norm are measured on the clients' images, and a
        callback has ended the run after a round that had no evaluation. The bytes are added to
        those of the last round, whose row has the test.

        Args:
            gather: Gives every rank's value.
            before: The bytes of the last round of this command; None if it had none.
        """
        sent = self._take_bytes(totals_of(gather(self._sums)))
        if not any(sent.values()):
            return {}
        scalars = {"communication/total_bytes": self.total_bytes}
        if before is None:
            return scalars
        return scalars | {name: before.get(name, 0.0) + size for name, size in sent.items() if size}

    def _take_bytes(self, counts: Metrics) -> Metrics:
        self._sums.clear()
        sent = starting_with("communication/", counts)
        self.total_bytes += sum(sent.values())
        return sent

    def add_logged(self) -> None:
        """Add what was logged to the means of the round."""
        for entry in self.logged:
            self._means.update(*entry)
        self.logged.clear()

    # Of the run.

    def publish(self, metrics: Metrics, round_index: int) -> None:
        """Make values the last ones: those of a round or of an evaluation."""
        self.last.update(as_tensors(metrics))
        for name in metrics:
            part = name.partition("/")[0]
            if part in ("val", "test"):
                self.rounds[part] = round_index

    def restore(
        self, metrics: Mapping[str, float], rounds: dict[str, int], total_bytes: float
    ) -> None:
        """Continue the scalars of a checkpoint: ``last``, ``rounds`` and ``total_bytes``."""
        self.last = as_tensors(metrics)
        self.rounds = rounds
        self.total_bytes = total_bytes
