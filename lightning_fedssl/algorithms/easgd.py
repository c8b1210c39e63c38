"""Elastic averaging: every cohort slot has its own weights, which are moved towards a centre after
every T steps.

* EASGD: S. Zhang, A. Choromanska, Y. LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS
  2015, arXiv 1412.6651;
* Overlap Local-SGD: J. Wang, H. Liang, G. Joshi, "Overlap Local-SGD: An Algorithmic Approach to
  Hide Communication Delays in Distributed SGD", ICASSP 2020, arXiv 2002.09539;

both in the setting of FedRGD's Table IV: users have labels, and all of them take part in every
round (K = C).

A round, with weights x_i of slot i and the centre z:

1. each user takes T supervised steps from its slot's x_i;
2. ``x'_i = x_i - a (x_i - z)``, with x_i after the steps;
3. EASGD: ``z' = z + a sum_i (x_i - z)``;
   Overlap Local-SGD: ``v' = b v + mean_i x'_i - z``, ``z' = z + v'``. The mean is over x'_i, so the
   distance to z counts 1 - a times.

The centre is evaluated. The new z is first used at the end of the next round, so that users can
train while it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.cohort_slots import SlotAlgorithm
from lightning_fedssl.functional.averaging import State, Sums, WeightedSum
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class EASGD(SlotAlgorithm):
    """Elastic averaging SGD with supervised users; weights persist per cohort slot.

    Args:
        alpha: a, the moving rate; 0.9 / C if left out, as its authors recommend and FedRGD does not
            state.
    """

    same_step_every_round = True
    labels_at = "clients"

    alpha: float | None = None

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.require(
            self.alpha is None or 0 < self.alpha <= 1,
            "alpha",
            self.alpha,
            "give a number above 0, at most 1, or null",
        )

    def broadcast(self, client: int) -> State:
        """The slot's own weights and batch-norm statistics; in the first round the centre's."""
        slot = self.slot_of[client]
        return {
            **self.server.parameters,
            **self.slot_buffers(slot),
            **self.clients.get(slot, "weights"),
        }

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the distances to the centre, and move the weights of each slot towards it."""
        rate = self._rate()
        total = WeightedSum()
        for update in updates:
            slot = self.slot_of[update.client]
            distance = map_values(torch.sub, update.parameters, self.server.parameters)
            moved = map_values(lambda x, d: x - rate * d, update.parameters, distance)
            self.clients.put(slot, "weights", moved)
            self.clients.put(slot, "buffers", update.buffers)
            total.add(distance)
        return {"distance": total}

    def aggregate(self, sums: Sums) -> None:
        """Move the centre; evaluation uses the batch-norm statistics of slot 0."""
        distance = sums["distance"]
        if distance.weight:
            moved = map_values(torch.add, self._step(distance), self.server.parameters)
            self.server.update(moved | self.clients.get(0, "buffers"))

    def _rate(self) -> float:
        return 0.9 / len(self.slot_of) if self.alpha is None else self.alpha

    def _step(self, distance: WeightedSum) -> State:
        """The step of the centre, computed from the sum of the distances."""
        return map_values(lambda d: self._rate() * d, distance.total)


@hyperparameters
class OverlapSGD(EASGD):
    """Overlap Local-SGD with supervised users.

    Args:
        alpha: a, the rate at which weights move towards the anchor z.
        beta: b, the anchor's momentum.
    """

    same_step_every_round = True

    alpha: float = 0.6
    beta: float = 0.7

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.decay(self, "beta")

    def _step(self, distance: WeightedSum) -> State:
        """v, the step of the anchor. Moving the weights towards the anchor scales the mean distance
        by 1 - a.
        """
        step = map_values(lambda d: (1 - self._rate()) * d / distance.weight, distance.total)
        if old := self.server.extra.get("momentum"):
            step = map_values(lambda d, v: self.beta * v + d, step, old)
        self.server.extra["momentum"] = step
        return step
