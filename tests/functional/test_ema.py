from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from lightning_fedssl.functional.ema import ema_update, warm_decay


def test_average_by_hand_and_under_vmap() -> None:
    """0.75 * 2 + 0.25 * 1; counters are copied; with decay 0.5: (2 + 0) / 2 and (4 + 2) / 2."""
    average, value, counter = torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor(3)
    ema_update({"a": average, "n": counter}, {"a": value, "n": torch.tensor(7)}, 0.75)
    assert average.item() == 0.75 * 2 + 0.25
    assert counter.item() == 7
    ema_update({"a": average}, {"a": value}, 0)
    assert torch.equal(average, value)
    assert average.data_ptr() != value.data_ptr()

    def one(average: Tensor, value: Tensor) -> Tensor:
        average = average.clone()
        ema_update({"a": average}, {"a": value}, 0.5)
        return average

    stacked = vmap(one)(torch.tensor([[2.0], [4.0]]), torch.tensor([[0.0], [2.0]]))
    assert stacked.tolist() == [[1.0], [3.0]]


def test_warm_decay() -> None:
    """Decay 1/2, then 2/3, of a teacher at 1 towards a student at 0: 1/2, then 1/2 * 2/3 = 1/3."""
    teacher, expected = torch.ones(1), {1: 0.5, 2: 1 / 3}
    for t in (1, 2):
        ema_update({"a": teacher}, {"a": torch.zeros(1)}, warm_decay(t, 0.99))
        assert teacher.item() == pytest.approx(expected[t])
    assert warm_decay(99, 0.99) == 0.99 == warm_decay(1000, 0.99)
    assert warm_decay(98, 0.99) < 0.99
    assert warm_decay(0, 0.99) == 0
