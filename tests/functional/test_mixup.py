import math

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.functional.mixup import mixup, mixup_cross_entropy


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
