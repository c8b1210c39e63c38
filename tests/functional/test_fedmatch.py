from __future__ import annotations

import math

import pytest
import torch

from lightning_fedssl.functional.fedmatch import helper_divergence


def test_divergence_from_helpers_by_hand() -> None:
    """KL((1/2, 1/2), (1/4, 3/4)) = log(2) / 2 + log(2/3) / 2 = 0.1438; the second image is masked."""
    local = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log().requires_grad_()
    helpers = torch.full((2, 2, 2), 0.5).requires_grad_()
    value = helper_divergence(local, helpers, torch.tensor([True, False]))
    assert value.item() == pytest.approx(0.1438, abs=5e-5)
    assert 0.01 * value.item() == pytest.approx(0.001438, abs=5e-7)
    assert helper_divergence(local, helpers, torch.tensor([False, False])).item() == 0
    certain = torch.tensor([[[1.0, 0.0]]])
    assert helper_divergence(local[:1], certain, torch.tensor([True])).item() == pytest.approx(math.log(4))
