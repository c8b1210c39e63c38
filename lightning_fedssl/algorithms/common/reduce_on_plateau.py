"""Divide the learning rate of a party when its validation loss stops falling."""

from __future__ import annotations

import math

import torch

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.state import Batch

_FRESH = {"factor": 1.0, "lowest": math.inf, "waited": 0.0}


def update_rate(rate: State, loss: float, patience: int, divisor: float) -> State:
    """Update the learning rate of a party (client or server) after a round in which it trained.

    Args:
        rate: ``factor`` of the configured rate, ``lowest`` loss so far and rounds ``waited`` since then; empty before
            the first round.
        loss: The validation loss.
        patience: Rounds without a lower loss after which the rate falls.
        divisor: What the rate is divided by.
    """
    factor, lowest, waited = (float(rate[key]) if rate else value for key, value in _FRESH.items())
    waited = 0.0 if loss < lowest else waited + 1
    if waited >= patience:
        factor, waited = factor / divisor, 0.0
    values = {"factor": factor, "lowest": min(loss, lowest), "waited": waited}
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}


def add_rate(batch: Batch, rate: State) -> Batch:
    """Add the factor of a party's learning rate to a batch as ``rate`` ``(batch,)``, unless it is 1.

    With plain SGD a factor of the loss is a factor of the learning rate, for stacked clients too.

    Args:
        batch: A step's tensors.
        rate: From :func:`update_rate`.
    """
    if not rate or float(rate["factor"]) == 1:
        return batch
    some = next(iter(batch.values()))
    return batch | {"rate": torch.full((len(some),), float(rate["factor"]), dtype=some.dtype, device=some.device)}
