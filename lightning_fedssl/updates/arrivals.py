"""What everything that a client sends passes: the checks, and the rules of ``trainer.updates``.

Updates and batch-norm moments pass the same functions. The moments of a party are an update of the
buffers alone, with the mean and the variance of every layer as its ``running_mean`` and
``running_var``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import LayerMoments, Moments, combine_moments
from lightning_fedssl.run import TrainerView
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates.acceptance import check_payload
from lightning_fedssl.updates.rule import Arrival, UpdateRule

_log = logging.getLogger(__name__)

Check = Callable[[FederatedAlgorithm, ClientUpdate], str | None]
"""Why an update is rejected whatever the others are; None if there is no reason."""


class Rules(list[UpdateRule]):
    """The rules of a run in their order.

    Args:
        trainer: The run.
    """

    def __init__(self, trainer: TrainerView) -> None:
        super().__init__(trainer.updates)
        self.trainer = trainer

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
        for rule in self:
            before = arrival.update
            if arrival.reason is None:
                arrival = rule.on_update(self.trainer, algorithm, arrival, received)
            if arrival.update is not before and (reason := check(algorithm, arrival.update)):
                return arrival.rejected(reason)
        return arrival

    def together(
        self, arrivals: list[Arrival], accepted: Sequence[Mapping[str, Any]]
    ) -> list[Arrival]:
        """The arrivals of a round as rules judge them that look at all; the same on every rank.

        Args:
            arrivals: Those that have waited.
            accepted: The notes of the updates that were accepted without waiting.
        """
        for rule in self:
            valid = [arrival for arrival in arrivals if arrival.reason is None]
            judged = rule.on_round(self.trainer, self.trainer.algorithm, valid, accepted)
            by_client = {arrival.update.client: arrival for arrival in judged}
            arrivals = [by_client.get(arrival.update.client, arrival) for arrival in arrivals]
        return arrivals

    def combined(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """What is averaged in place of accepted updates; with a rule that combines, it is one."""
        for rule in self:
            updates = rule.combine(self.trainer, self.trainer.algorithm, updates)
        return updates

    def moments(self, of_parties: Mapping[int, LayerMoments]) -> LayerMoments:
        """The batch-norm moments of all parties together; every rank must call it.

        Without a rule that combines, those that are accepted are combined exactly. A rule that
        combines does so with the means, and with the mean square distances of every party from one
        centre, the median of the means: so the variance between the parties counts.

        Args:
            of_parties: The moments of each party, of the same layers.

        Returns:
            Those of all; empty if none is accepted.
        """
        trainer = self.trainer
        buffers = trainer.algorithm.server.buffers
        centre = {}
        if any(rule.place == 2 for rule in self):
            for layer in next(iter(of_parties.values()), ()):
                means = torch.stack([moments[layer].mean for moments in of_parties.values()])
                centre[layer] = means.nanmedian(dim=0).values
        accepted = []
        arrivals = []
        for party, moments in of_parties.items():
            update = _as_update(party, moments, centre)
            if party == sampling.SERVER:  # which trusts itself
                accepted.append(update)
                continue
            received = {name: buffers[name].to(t) for name, t in update.buffers.items()}
            arrivals.append(self.alone(Arrival(update), received, check_moments))
        for arrival in self.together(arrivals, ()):
            if arrival.reason is None:
                accepted.append(arrival.update)
                continue
            if trainer.is_global_zero:
                trainer.run.scalars.count({"client/refused": 1})
            _log.warning(
                "round %d: client %d: it %s; statistics without it",
                trainer.round_index, arrival.update.client, arrival.reason,
            )  # fmt: skip
        combined = self.combined(iter(accepted))
        return combine_moments(
            _as_moments(update, of_parties[update.client], centre) for update in combined
        )


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
        largest = math.sqrt(torch.finfo(algorithm.server.buffers[name].dtype).max / 8)
        size = t.abs() if name.endswith("running_mean") else t.sqrt()  # NaN where it is negative
        possible.append((size <= largest).all())
    if possible and not bool(torch.stack(possible).all()):
        return "returned moments that are negative variances, not finite or too large"
    return None


def _as_update(party: int, moments: LayerMoments, centre: State) -> ClientUpdate:
    buffers = {}
    for layer, (_, mean, variance) in moments.items():
        buffers[f"{layer}.running_mean"] = mean
        apart = (mean - centre.get(layer, mean)).square()
        buffers[f"{layer}.running_var"] = variance + apart
    return ClientUpdate(party, {}, buffers, num_samples=1, num_steps=1)


def _as_moments(update: ClientUpdate, counted: LayerMoments, centre: State) -> LayerMoments:
    moments = {}
    for layer, of_layer in counted.items():
        mean = update.buffers[f"{layer}.running_mean"]
        apart = (mean - centre.get(layer, mean)).square()
        variance = (update.buffers[f"{layer}.running_var"] - apart).clamp(min=0)
        moments[layer] = Moments(of_layer.count, mean, variance)
    return moments
