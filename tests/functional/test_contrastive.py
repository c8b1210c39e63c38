"""The contrastive loss, the memory queue, moving averages and the teacher."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedssl.functional.contrastive import References, contrastive_loss
from lightning_fedssl.models.memory_queue import MemoryQueue

Z = torch.tensor([[1.0, 0.0]])
KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
LABELS = torch.tensor([0, 0, 1])


def loss(confident: list[bool], **kwargs: bool) -> float:
    references = References.all_valid(KEYS, LABELS, torch.tensor(confident))
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
        references = References.cat(References.all_valid(KEYS, LABELS), queue.references(empty_count=empty_count))
        assert float(contrastive_loss(Z, torch.tensor([0]), references, 0.2)) == pytest.approx(expected, abs=1e-5)


def test_contrastive_gradient_is_finite_without_references_and_zero_without_positives() -> None:
    z = Z.clone().requires_grad_()
    contrastive_loss(
        z, torch.tensor([0]), References.all_valid(Z, torch.tensor([0])), 0.2, own_key=False
    ).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros(1, 2))
    contrastive_loss(z, torch.tensor([7]), References.all_valid(KEYS, LABELS), 0.2).sum().backward()
    assert torch.equal(z.grad, torch.zeros(1, 2))
