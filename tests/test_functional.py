import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.functional.averaging import WeightedSum, is_finite, momentum_step, sizes_of
from lightning_fedssl.functional.ema import ema_update
from lightning_fedssl.functional.losses import masked_cross_entropy, proximal_term
from lightning_fedssl.functional.mixup import mixup, mixup_cross_entropy
from lightning_fedssl.functional.pseudo_labels import pseudo_label


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


def test_sum_keeps_no_reference_to_what_was_added() -> None:
    live = torch.tensor([1.0])
    total = WeightedSum()
    total.add({"w": live})
    live.fill_(100.0)
    mean = total.mean()
    assert mean is not None
    assert mean["w"].item() == 1.0


def test_order_of_clients_does_not_matter() -> None:
    states = [{"w": torch.randn(50, dtype=torch.float64)} for _ in range(7)]
    forward, backward = WeightedSum(), WeightedSum()
    for i in range(7):
        forward.add(states[i], i + 1)
        backward.add(states[6 - i], 7 - i)
    a, b = forward.mean(), backward.mean()
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a["w"], b["w"], rtol=1e-13, atol=1e-13)


def test_server_momentum_sequence_of_semifl() -> None:
    """1.0 -> 0.7; fine-tuned to 0.9; -> 0.55 with momentum 0.5."""
    weights, buffer = momentum_step(scalar(1.0), mean_of(0.6, 0.8), {}, 0.5)
    assert weights["w"].item() == pytest.approx(0.7, abs=1e-12)
    assert buffer["w"].item() == pytest.approx(0.3, abs=1e-12)
    weights, buffer = momentum_step(scalar(0.9), mean_of(0.7, 0.7), buffer, 0.5)
    assert weights["w"].item() == pytest.approx(0.55, abs=1e-12)
    assert buffer["w"].item() == pytest.approx(0.35, abs=1e-12)


def test_momentum_zero_is_exactly_the_mean() -> None:
    mean = mean_of(0.1, 0.7)
    weights, buffer = momentum_step(scalar(3.0), mean, {}, 0.0)
    assert torch.equal(weights["w"], mean["w"])
    assert buffer == {}
    half, _ = momentum_step(scalar(3.0), scalar(1.0), {}, 0.0, lr=0.5)
    assert half["w"].item() == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_is_finite_finds_one_bad_number(bad: float) -> None:
    tensors = [torch.zeros(3), torch.randn(4, 4), torch.zeros(0)]
    assert is_finite(tensors)
    tensors[1][2, 2] = bad
    assert not is_finite(tensors)
    assert is_finite([])


def test_sizes_of() -> None:
    state = {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.float64)}
    assert sizes_of(state) == {"a": 24, "b": 40}


def test_pseudo_label_threshold_is_inclusive() -> None:
    probabilities = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    result = pseudo_label(probabilities.log(), 0.75)
    assert result.labels[:2].tolist() == [0, 1]
    exact = pseudo_label(probabilities.log(), float(torch.softmax(probabilities.log(), -1)[0, 0]))
    assert exact.mask[0]
    assert not exact.mask[2]
    soft = pseudo_label(probabilities.log(), 0.75, soft=True)
    torch.testing.assert_close(soft.labels, probabilities)


def test_uniform_logits_cost_log_k_for_any_ratio() -> None:
    logits = torch.zeros(4, 10, dtype=torch.float64)
    y, other = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])
    for ratio in (0.0, 0.3, 1.0):
        loss = mixup_cross_entropy(logits, y, other, torch.full((4,), ratio, dtype=torch.float64))
        assert loss.item() == pytest.approx(math.log(10), abs=1e-12)


def test_ratio_one_is_plain_cross_entropy_of_the_first() -> None:
    logits, y, other = torch.randn(4, 10), torch.arange(4), torch.arange(4) + 3
    ones = torch.ones(4)
    torch.testing.assert_close(mixup_cross_entropy(logits, y, other, ones), F.cross_entropy(logits, y))
    x, x_other = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    assert torch.equal(mixup(x, x_other, ones), x)
    assert torch.equal(mixup(x, x_other, 0 * ones), x_other)
    torch.testing.assert_close(mixup(x, x_other, 0.25 * ones), 0.25 * x + 0.75 * x_other)


def test_masked_cross_entropy_averages_over_the_kept() -> None:
    logits, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    mask = torch.tensor([True, False, True, False])
    torch.testing.assert_close(masked_cross_entropy(logits, y, mask), F.cross_entropy(logits[mask], y[mask]))
    assert masked_cross_entropy(logits, y, torch.zeros(4, dtype=torch.bool)).item() == 0


def test_proximal_term_by_hand() -> None:
    """Half of 1^2 + 2^2 + (3 - 1)^2; the gradient is the difference to the anchor."""
    weights = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    anchors = [torch.tensor([0.0, 0.0]), torch.tensor([1.0])]
    term = proximal_term(weights, anchors)
    assert term.item() == pytest.approx(0.5 * (1 + 4 + 4))
    (gradient,) = torch.autograd.grad(term, weights[:1])
    assert torch.equal(gradient, torch.tensor([1.0, 2.0]))


def test_ema_by_hand_alone_and_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    teachers, students = ({"w": torch.randn(3, 4, generator=generator)} for _ in range(2))
    expected = 0.75 * teachers["w"] + 0.25 * students["w"]

    def follow(teacher: dict[str, Tensor], student: dict[str, Tensor]) -> Tensor:
        ema_update(teacher, student, 0.75)
        return teacher["w"]

    stacked = torch.func.vmap(follow)({"w": teachers["w"].clone()}, students)
    ema_update(teachers, students, 0.75)
    torch.testing.assert_close(teachers["w"], expected)
    torch.testing.assert_close(stacked, expected)
    students["w"].requires_grad_()
    ema_update(teachers, students, 0)
    assert torch.equal(teachers["w"], students["w"])
    assert not teachers["w"].requires_grad
    assert teachers["w"].data_ptr() != students["w"].data_ptr()
