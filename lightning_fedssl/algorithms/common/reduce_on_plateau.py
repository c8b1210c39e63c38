"""A learning rate that falls when a party's validation loss does not."""

from __future__ import annotations

import math

import torch

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.state import Batch

_FRESH = {"factor": 1.0, "lowest": math.inf, "waited": 0.0}


def adapted(rate: State, loss: float, patience: int, divisor: float) -> State:
    """A party's rate after a round in which it trained.

    Args:
        rate: ``factor`` of the configured rate, ``lowest`` loss so far and rounds ``waited`` since then; empty before
            the first round.
        loss: The validation loss.
        patience: Rounds without a lower loss after which the rate falls.
        divisor: By how much.
    """
    factor, lowest, waited = (float(rate[key]) if rate else value for key, value in _FRESH.items())
    waited = 0.0 if loss < lowest else waited + 1
    if waited >= patience:
        factor, waited = factor / divisor, 0.0
    values = {"factor": factor, "lowest": min(loss, lowest), "waited": waited}
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}


def with_rate(batch: Batch, rate: State) -> Batch:
    """A batch with the factor of a party's rate, ``rate`` ``(batch,)``, where it is no longer 1.

    With plain SGD a factor of the loss is a factor of the rate, also where clients train together.

    Args:
        batch: A step's tensors.
        rate: From :func:`adapted`.
    """
    if not rate or float(rate["factor"]) == 1:
        return batch
    some = next(iter(batch.values()))
    return batch | {"rate": torch.full((len(some),), float(rate["factor"]), device=some.device)}
