"""The contrastive loss, the memory queue, moving averages and the teacher."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from lightning_fedssl.functional.contrastive import References, contrastive_loss
from lightning_fedssl.functional.ema import ema_update, warm_decay
from lightning_fedssl.functional.pseudo_labels import skew_of
from lightning_fedssl.models.memory_queue import MemoryQueue
from lightning_fedssl.models.teacher import Teacher

Z = torch.tensor([[1.0, 0.0]])
KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
LABELS = torch.tensor([0, 0, 1])


def loss(confident: list[bool], **kwargs: bool) -> float:
    references = References.of(KEYS, LABELS, torch.tensor(confident))
    return float(contrastive_loss(Z, torch.tensor([0]), references, 0.2, **kwargs))


def test_contrastive_loss_by_hand() -> None:
    """z . keys / kappa = 5, 0, -5, so log sum exp = 5.00676; the positives have 0.00676 and 5.00676, mean 2.50676."""
    log_sum = math.log(math.exp(5) + 1 + math.exp(-5))
    assert loss([True, True, True]) == pytest.approx(((log_sum - 5) + log_sum) / 2, abs=1e-5)
    assert loss([True, True, True]) == pytest.approx(2.50676, abs=1e-5)
    assert loss([False, True, True]) == pytest.approx(5.00676, abs=1e-5)
    assert loss([False, False, True]) == 0
    assert loss([True, True, True], own_key=False) == pytest.approx(math.log(1 + math.exp(-5)), abs=1e-5)


def test_empty_slots_count_only_when_asked_to() -> None:
    """A zero vector adds exp(0) = 1 to the sum: log(e^5 + 2 + e^-5) - (5 + 0) / 2 = 2.51343."""
    queue = MemoryQueue(1, 2)
    for empty_count, expected in ((False, 2.50676), (True, 2.51343)):
        references = References.cat(References.of(KEYS, LABELS), queue.references(empty_count=empty_count))
        assert float(contrastive_loss(Z, torch.tensor([0]), references, 0.2)) == pytest.approx(expected, abs=1e-5)


def test_contrastive_gradient_is_finite_without_references_and_zero_without_positives() -> None:
    z = Z.clone().requires_grad_()
    contrastive_loss(z, torch.tensor([0]), References.of(Z, torch.tensor([0])), 0.2, own_key=False).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros(1, 2))
    contrastive_loss(z, torch.tensor([7]), References.of(KEYS, LABELS), 0.2).sum().backward()
    assert torch.equal(z.grad, torch.zeros(1, 2))


def pushed(queue: MemoryQueue, values: list[int], confident: bool = True) -> None:
    keys = torch.tensor(values, dtype=torch.float32)[:, None]
    flags = torch.full((len(values),), confident)
    queue.push(References.of(keys, torch.tensor(values), flags))


def test_queue_is_a_ring() -> None:
    queue = MemoryQueue(4, 1)
    assert not queue.references().valid.any()
    pushed(queue, [1, 2, 3])
    assert queue.references().labels.tolist() == [1, 2, 3, -1]
    assert queue.references().valid.tolist() == [True, True, True, False]
    pushed(queue, [4, 5], confident=False)
    assert queue.references().labels.tolist() == [5, 2, 3, 4]
    assert queue.references().keys.flatten().tolist() == [5, 2, 3, 4]
    assert queue.references().confident.tolist() == [False, True, True, False]
    assert queue.references(all_confident=True).confident.all()
    pushed(queue, [6, 7, 8, 9, 10, 11])  # more than it holds: the last four remain
    assert sorted(queue.references().labels.tolist()) == [8, 9, 10, 11]
    pushed(queue, [12])
    assert sorted(queue.references().labels.tolist()) == [9, 10, 11, 12]
    queue.clear()
    assert not queue.references().valid.any()
    assert queue.references(empty_count=True).valid.all()


def test_references_of_a_queue_are_not_its_storage() -> None:
    queue = MemoryQueue(2, 1)
    pushed(queue, [1, 2])
    before = queue.references()
    pushed(queue, [3, 4])
    assert before.labels.tolist() == [1, 2]


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


def test_teacher_shares_no_storage_and_follows_weights_and_buffers() -> None:
    network: Any = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    teacher: Any = Teacher({"network": network})
    shared = {t.data_ptr() for t in (*network.parameters(), *network.buffers())}
    assert not shared & {t.data_ptr() for t in (*teacher.parameters(), *teacher.buffers())}
    before = {name: t.clone() for name, t in teacher["network"].state_dict().items()}
    network.train()
    network(torch.randn(4, 1, 2, 2))
    with torch.no_grad():
        network[0].weight.add_(1.0)
    teacher.follow({"network": network}, 0.9)
    for name, t in teacher["network"].state_dict().items():
        s = network.state_dict()[name]
        expected = 0.9 * before[name] + 0.1 * s if t.is_floating_point() else s
        torch.testing.assert_close(t, expected)
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not teacher.train().training
    assert not teacher["network"][1].training


def test_skew_of_mean_predictions() -> None:
    certain = 200 * torch.eye(10)
    assert float(skew_of(certain)) == pytest.approx(0, abs=1e-6)
    assert float(skew_of(certain[:1])) == pytest.approx(math.log(10), abs=1e-6)
    assert float(skew_of(certain[:2])) == pytest.approx(math.log(5), abs=1e-6)
    assert float(skew_of(torch.zeros(3, 10))) == pytest.approx(0, abs=1e-9)
