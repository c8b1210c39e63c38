"""The optimizer of the server's step, computed by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.state import ServerState
from tests.toy import toy_fedavg

UPDATES = (0.375, -0.1, 0.7)
"""What the clients' mean lies below the global weight in each round: the gradients of the server's steps."""


def trajectory(optimizer: Any) -> list[float]:
    """A global weight, at first 1, after each round."""
    algorithm = toy_fedavg(aggregation_optimizer=optimizer)
    algorithm.server, found = ServerState({"w": torch.ones(1, dtype=torch.float64)}, {}), []
    for update in UPDATES:
        total = WeightedSum()
        total.add({"w": algorithm.server.parameters["w"] - update})
        algorithm.aggregate({"model": total})
        found.append(algorithm.server.parameters["w"].item())
    return found


def averaged() -> list[float]:
    """FedAvg: the mean itself."""
    w, found = 1.0, []
    for g in UPDATES:
        w -= g
        found.append(w)
    return found


def fedavgm(beta: float) -> list[float]:
    """``v = beta v + g``, ``w = w - v``, SemiFL's beta_g."""
    w, v, found = 1.0, 0.0, []
    for g in UPDATES:
        v = beta * v + (w - (w - g))
        w -= v
        found.append(w)
    return found


def fedadagrad(lr: float, tau: float) -> list[float]:
    """Reddi et al., Algorithm 2 without beta_1: ``v = v + g^2``, ``w = w - lr g / (sqrt(v) + tau)``."""
    w, v, found = 1.0, 0.0, []
    for g in UPDATES:
        v += g**2
        w -= lr * g / (v**0.5 + tau)
        found.append(w)
    return found


def fedadam(lr: float, tau: float) -> list[float]:
    """Algorithm 2 with beta_1 = 0.9 and beta_2 = 0.99, and torch's correction of the first steps' bias."""
    w, m, v, found = 1.0, 0.0, 0.0, []
    for t, g in enumerate(UPDATES, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        w -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)) ** 0.5 + tau)
        found.append(w)
    return found


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (None, averaged()),
        (partial(torch.optim.SGD, lr=1), averaged()),
        (partial(torch.optim.Adagrad, lr=0.1, eps=1e-3), fedadagrad(0.1, 1e-3)),
        (partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.99), eps=1e-3), fedadam(0.1, 1e-3)),
    ],
)
def test_a_step_is_that_of_the_paper(optimizer: Any, expected: list[float]) -> None:
    assert trajectory(optimizer) == pytest.approx(expected, abs=1e-12)


def test_the_momentum_of_semifl_is_that_of_sgd_in_the_last_bit() -> None:
    assert trajectory(partial(torch.optim.SGD, lr=1, momentum=0.5)) == fedavgm(0.5)
