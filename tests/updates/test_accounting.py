"""Epsilon against reference values of dp-accounting and Opacus, and the calibration of noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

from lightning_fedssl.updates.accounting import Budget, calibrated


def budget(q: tuple[int, int], z: float, rounds: int, **changes: Any) -> Budget:
    cohort, clients = q
    return replace(Budget(z, rounds, clients, cohort), **changes)


@pytest.mark.parametrize(
    ("given", "delta", "expected"),
    [
        (((1, 100), 1.0, 1000), 1e-5, 1.828),  # Opacus' PRV accountant: 1.838
        (((10, 100), 1.0, 800), 1e-5, 21.94),  # PRV: 21.95
        (((5, 100), 2.0, 600), 1e-6, 3.163),  # PRV: 3.174
        (((10, 100), 2.0, 600), 1e-3, 4.45),
    ],
)
def test_epsilon_is_that_of_the_references(given: Any, delta: float, expected: float) -> None:
    assert budget(*given).epsilon(delta) == pytest.approx(expected, rel=0.01)


def test_calibrated_noise_spends_the_budget_and_not_more() -> None:
    planned = budget((10, 100), 0.0, 50)
    z = calibrated(planned, 2.0, 1e-5)
    assert 1.98 < replace(planned, noise_multiplier=z).epsilon(1e-5) <= 2.0
    with pytest.raises(ValueError, match=r"no noise reaches epsilon 1e-09"):
        calibrated(planned, 1e-9, 1e-12)


def test_no_round_costs_nothing_and_no_noise_everything() -> None:
    assert budget((1, 10), 1.0, 0).epsilon(1e-5) == 0
    assert budget((1, 10), 0.0, 3).epsilon(1e-5) == math.inf
    assert budget((1, 10), 1.0, 1).epsilon(1e-5, more_rounds=2) == budget((1, 10), 1.0, 3).epsilon(1e-5)


def test_the_description_names_everything_that_epsilon_depends_on() -> None:
    described = budget((10, 100), 2.0, 3).describe(1e-3)
    for part in ("epsilon", "delta 0.001", "one client", "add or remove", "3 rounds", "PLD", "100 clients", "0.1"):
        assert part in described["statement"]
