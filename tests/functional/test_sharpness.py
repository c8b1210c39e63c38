"""Steps towards larger losses."""

from __future__ import annotations

import pytest
import torch

from lightning_fedssl.functional.sharpness import asam_step


def test_step_by_hand() -> None:
    """T g is (2 * 0.5, 1 * 2, 2) = (1, 2, 2), of norm 3; eps is rho T (T g) / 3."""
    weights = {"layer.weight": torch.tensor([-1.5, 0.5]), "layer.bias": torch.tensor([7.0])}
    gradients = {"layer.weight": torch.tensor([0.5, 2.0]), "layer.bias": torch.tensor([2.0])}
    eps = asam_step(weights, gradients, rho=0.3, eta=0.5)
    torch.testing.assert_close(eps["layer.weight"], torch.tensor([0.2, 0.2]))
    torch.testing.assert_close(eps["layer.bias"], torch.tensor([0.2]))


def test_no_other_step_of_the_same_relative_length_raises_the_loss_more() -> None:
    generator = torch.Generator().manual_seed(0)
    w, g = (torch.randn(5, generator=generator) for _ in range(2))
    eps = asam_step({"weight": w}, {"weight": g}, rho=0.1, eta=0.01)["weight"]
    scale = w.abs() + 0.01
    assert float((eps / scale).norm()) == pytest.approx(0.1)
    others = torch.randn(1000, 5, generator=generator)
    others = 0.1 * scale * others / others.norm(dim=1, keepdim=True)
    assert float(g @ eps) >= float((others @ g).max())


def test_without_a_gradient_there_is_no_step() -> None:
    assert not asam_step({"weight": torch.ones(3)}, {"weight": torch.zeros(3)}, rho=0.1, eta=0.01)["weight"].any()
