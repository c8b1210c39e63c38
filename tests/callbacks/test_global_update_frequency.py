"""The adaptation of K_s (Semi-SFL, Eq. 9)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fedssl.callbacks import GlobalUpdateFrequency


def run(losses: dict[int, float], rounds: int = 1000, **kwargs: Any) -> list[int]:
    """K_s of every round; ``losses`` has the loss from a round on, by round."""
    callback, values, loss = GlobalUpdateFrequency(**kwargs), [], 5.0
    algorithm: Any = SimpleNamespace(server_steps=0, adapts_server_steps=True)
    for h in range(1, rounds + 1):
        trainer: Any = SimpleNamespace(round_index=h, log=lambda *args: None)
        callback.on_round_start(trainer, algorithm)
        values.append(algorithm.server_steps)
        loss = losses.get(h, loss)
        callback.on_round_end(trainer, algorithm, {"server/loss": loss})
    return values


def test_eq_9_by_hand_gives_the_published_mean() -> None:
    """(250 * 80 + 150 * 40 + 200 * 20 + 100 * 10 + 300 * 5) / 1000 = 32.5."""
    values = run({141: 4.97})  # |Delta| = 0.03 at 150, and 0 at the later milestones
    steps = {1: 80, 150: 80, 250: 80, 251: 40, 400: 40, 401: 20, 600: 20, 601: 10, 700: 10, 701: 5, 1000: 5}
    assert {h: values[h - 1] for h in steps} == steps
    assert sum(values) / len(values) == 32.5


@pytest.mark.parametrize(("change", "expected"), [(0.06, 160), (-0.06, 160), (0.0099, 40), (0.011, 80), (0.049, 80)])
def test_large_changes_double_and_small_ones_halve(change: float, expected: int) -> None:
    assert run({141: 5 + change}, rounds=151)[-1] == expected


def test_halving_ends_at_one_and_is_integer() -> None:
    values = run({}, rounds=60, start=5, milestones=[20, 30, 40, 50])
    assert [values[h] for h in (20, 30, 40, 50)] == [2, 1, 1, 1]
    assert all(type(value) is int for value in values)


def test_rounds_in_which_the_server_makes_no_step_are_left_out() -> None:
    callback = GlobalUpdateFrequency(start=8, window=2, milestones=[4, 5, 6])
    values = []
    for h in range(1, 7):
        trainer, method = (SimpleNamespace(round_index=h), SimpleNamespace())
        callback.on_round_end(trainer, method, {} if h in (2, 6) else {"server/loss": 5.0})  # type: ignore[arg-type]
        values.append(callback.value)
    assert values == [8, 8, 8, 8, 4, 2]  # in round 4 the windows have three of their four losses


def test_state_is_restored_on_resuming() -> None:
    first, second = GlobalUpdateFrequency(), GlobalUpdateFrequency()
    first.value, first.losses = 20, [1.0, 2.0]
    second.load_state_dict(first.state_dict())
    assert (second.value, second.losses) == (20, [1.0, 2.0])
    assert second.losses is not first.losses


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"start": 0}, "at least one step"),
        ({"milestones": [19]}, "milestone 19 comes before two windows of 10 rounds"),
        ({"rho_1": 0.1}, "0 < rho_1 < rho_2"),
    ],
)
def test_bad_settings_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalUpdateFrequency(**kwargs)


def test_a_method_with_a_fixed_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set model\.server_steps to null"):
        GlobalUpdateFrequency().setup(None, SimpleNamespace(adapts_server_steps=False), "fit")
