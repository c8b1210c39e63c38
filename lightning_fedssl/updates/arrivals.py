"""What everything that a client sends passes: the checks, and the rules of ``trainer.updates``.

Updates and batch-norm moments pass the same functions. The moments of a party are an update of the
buffers alone, with the mean and the variance of every layer as its ``running_mean`` and
``running_var``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import LayerMoments, Moments, combine_moments
from lightning_fedssl.run import Run
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates.acceptance import check_payload
from lightning_fedssl.updates.rule import Arrival, UpdateRule

_log = logging.getLogger(__name__)

Check = Callable[[FederatedAlgorithm, ClientUpdate], str | None]
"""Why an update is rejected whatever the others are; None if there is no reason."""


class Rules:
    """The rules of a run in their order.

    Args:
        trainer: The run.
    """

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        self._rules: list[UpdateRule] = trainer.updates

    def __iter__(self) -> Iterator[UpdateRule]:
        return iter(self._rules)

    def alone(self, arrival: Arrival, received: State, check: Check) -> Arrival:
        """What single updates are rejected for, and what rules make of them.

        Args:
            arrival: The update as it was sent.
            received: What its client received; a tensor that it lacks is the server's.
            check: What holds for every update, also after a rule has changed it.
        """
        algorithm = self.trainer.algorithm
        received = {**algorithm.server.model(), **received}  # a client may get a model of its own
        reason = check(algorithm, arrival.update) or check_payload(algorithm, arrival.update)
        if reason:
            return arrival.rejected(reason)
        for rule in self._rules:
            before = arrival.update
            if arrival.reason is None:
                arrival = rule.on_update(self.trainer, algorithm, arrival, received)
            if arrival.update is not before and (reason := check(algorithm, arrival.update)):
                return arrival.rejected(reason)
        return arrival

    def together(
        self, arrivals: list[Arrival], passed: Sequence[Mapping[str, Any]]
    ) -> list[Arrival]:
        """The arrivals of a round as rules judge them that look at all; the same on every rank.

        Args:
            arrivals: Those that have waited.
            passed: The notes of those that have not, and were accepted.
        """
        for rule in self._rules:
            valid = [arrival for arrival in arrivals if arrival.reason is None]
            judged = rule.on_round(self.trainer, self.trainer.algorithm, valid, passed)
            found = {arrival.update.client: arrival for arrival in judged}
            arrivals = [found.get(arrival.update.client, arrival) for arrival in arrivals]
        return arrivals

    def combined(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """What is averaged in place of accepted updates; with a rule that combines, it is one."""
        for rule in self._rules:
            updates = rule.combine(self.trainer, self.trainer.algorithm, updates)
        return updates

    def moments(self, found: Mapping[int, LayerMoments]) -> LayerMoments:
        """The batch-norm moments of all parties together; every rank must call it.

        Without a rule that combines, those that are accepted are combined exactly. A rule that
        combines does so with the means, and with the mean square distances of every party from one
        centre, the median of the means: so the variance between the parties counts.

        Args:
            found: The moments of each party, of the same layers.

        Returns:
            Those of all; empty if none is accepted.
        """
        trainer = self.trainer
        known = trainer.algorithm.server.buffers
        accepted = []
        arrivals = []
        for party, moments in found.items():
            update = _as_update(party, moments)
            if party == sampling.SERVER:  # which trusts itself
                accepted.append(update)
                continue
            received = {name: known[name].to(t) for name, t in update.buffers.items()}
            arrivals.append(self.alone(Arrival(update), received, check_moments))
        for arrival in self.together(arrivals, ()):
            if arrival.reason is None:
                accepted.append(arrival.update)
                continue
            if trainer.is_global_zero:
                trainer.scalars.count("client/refused", 1)
            _log.warning(
                "round %d: client %d: it %s; statistics without it",
                trainer.round_index,
                arrival.update.client,
                arrival.reason,
            )
        if accepted and any(rule.place == 2 for rule in self._rules):
            centre = _centre(accepted)
            around = [_around(update, centre, 1) for update in accepted]
            accepted = [_around(update, centre, -1) for update in self.combined(iter(around))]
        return combine_moments(_as_moments(update, found) for update in accepted)


def check_moments(algorithm: FederatedAlgorithm, update: ClientUpdate) -> str | None:
    """Why the server rejects moments, independently of others; None if there is no reason.

    Args:
        algorithm: Its global model has the types of the statistics.
        update: The moments as an update.

    Returns:
        The end of a sentence about the client.
    """
    possible = []
    for name, t in update.buffers.items():
        most = torch.finfo(algorithm.server.buffers[name].dtype).max / 8
        if name.endswith("running_mean"):  # its square enters the variance
            possible.append((t.abs() <= math.sqrt(most)).all())
        else:
            possible.append(((t >= 0) & (t <= most)).all())
    if possible and not bool(torch.stack(possible).all()):
        return "returned moments that are negative variances, not finite or too large"
    return None


def _as_update(party: int, moments: LayerMoments) -> ClientUpdate:
    buffers = {}
    for layer, of_layer in moments.items():
        buffers[f"{layer}.running_mean"] = of_layer.mean
        buffers[f"{layer}.running_var"] = of_layer.variance
    return ClientUpdate(party, {}, buffers, num_samples=1, num_steps=1)


def _as_moments(update: ClientUpdate, found: Mapping[int, LayerMoments]) -> LayerMoments:
    counted = found[update.client]
    buffers = update.buffers
    return {
        layer: Moments(
            of_layer.count, buffers[f"{layer}.running_mean"], buffers[f"{layer}.running_var"]
        )
        for layer, of_layer in counted.items()
    }


def _centre(updates: Sequence[ClientUpdate]) -> State:
    """The median over the parties of each mean, under the name of its layer's variance."""
    centre = {}
    for name in updates[0].buffers:
        layer, _, kind = name.rpartition(".")
        if kind == "running_mean":
            means = torch.stack([update.buffers[name] for update in updates])
            centre[f"{layer}.running_var"] = means.median(dim=0).values
    return centre


def _around(update: ClientUpdate, centre: State, sign: int) -> ClientUpdate:
    """The variances with, or again without, the squared distance of the mean from the centre."""
    buffers = dict(update.buffers)
    for name, middle in centre.items():
        mean = buffers[f"{name.removesuffix('running_var')}running_mean"]
        buffers[name] = (buffers[name] + sign * (mean - middle).square()).clamp(min=0)
    return replace(update, buffers=buffers)
