"""The optimizer of the server's step, computed by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.functional.optimizers import FedOpt
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


def fedopt(rule: str, beta: float) -> list[float]:
    """Reddi et al., Algorithm 2, with lr 0.1, beta_2 = 0.99 and tau = 0.2: v begins with 0.04."""
    w, m, v, found = 1.0, 0.0, 0.04, []
    for g in UPDATES:
        m = beta * m + (1 - beta) * g
        v = {
            "adam": 0.99 * v + 0.01 * g**2,
            "yogi": v - 0.01 * g**2 * math.copysign(1, v - g**2),
            "adagrad": v + g**2,
        }[rule]
        w -= 0.1 * m / (math.sqrt(v) + 0.2)
        found.append(w)
    return found


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (None, averaged()),
        (partial(torch.optim.SGD, lr=1), averaged()),
        (partial(FedOpt, lr=0.1, tau=0.2), fedopt("adam", 0.9)),
        (partial(FedOpt, lr=0.1, tau=0.2, rule="yogi"), fedopt("yogi", 0.9)),
        (partial(FedOpt, lr=0.1, tau=0.2, rule="adagrad", betas=(0, 0.99)), fedopt("adagrad", 0)),
    ],
)
def test_a_step_is_that_of_the_paper(optimizer: Any, expected: list[float]) -> None:
    assert trajectory(optimizer) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"tau": 0.0}, {"betas": (0.9, 1.0)}, {"rule": "amsgrad"}])
def test_values_out_of_range_are_refused_by_the_key(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"^model\.aggregation_optimizer: .*{name}"):
        toy_fedavg(aggregation_optimizer=partial(FedOpt, **wrong))


def test_the_momentum_of_semifl_is_that_of_sgd_in_the_last_bit() -> None:
    assert trajectory(partial(torch.optim.SGD, lr=1, momentum=0.5)) == fedavgm(0.5)
