import math

import pytest
import torch

from lightning_fedssl.functional.averaging import WeightedSum, is_finite


def scalar(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value], dtype=torch.float64)}


def mean_of(*values: float) -> dict[str, torch.Tensor]:
    total = WeightedSum()
    for value in values:
        total.add(scalar(value))
    mean = total.mean()
    assert mean is not None
    return mean


def test_weighted_mean_by_hand() -> None:
    """Weights 1 and 3: (1 + 3 * 3) / 4, (2 + 3 * 6) / 4 and (3 + 3 * 5) / 4."""
    total = WeightedSum()
    total.add({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}, 1)
    total.add({"b": torch.tensor(5.0), "a": torch.tensor([3.0, 6.0])}, 3)
    mean = total.mean()
    assert mean is not None
    assert torch.equal(mean["a"], torch.tensor([2.5, 5.0]))
    assert mean["b"] == 4.5
    nothing = WeightedSum()  # the buffers of a model without any
    nothing.add({}, 3)
    assert nothing.mean() == {}
    assert (total.count, total.weight) == (2, 4)


def test_weight_zero_contributes_nothing_even_if_it_is_nan() -> None:
    total = WeightedSum()
    total.add(scalar(math.nan), 0)
    assert total.mean() is None
    total.add(scalar(2.0), 1)
    total.add(scalar(math.inf), 0)
    mean = total.mean()
    assert mean is not None
    assert mean["w"].item() == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_is_finite_finds_one_bad_number(bad: float) -> None:
    tensors = [torch.zeros(3), torch.randn(4, 4), torch.zeros(0)]
    assert is_finite(tensors)
    tensors[1][2, 2] = bad
    assert not is_finite(tensors)
    assert is_finite([])
