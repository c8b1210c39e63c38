from __future__ import annotations

import pytest
import torch

from lightning_fedssl.models import CNN, ResNet9
from lightning_fedssl.models.decomposed import Decomposed


def test_decomposition() -> None:
    """Truncation at two deviations scales the deviation by 0.8796, so values are at most 2 / 0.8796 times it."""
    torch.manual_seed(0)
    network = Decomposed(ResNet9(norm="none", bias=False))
    sigmas, psis = network.parts()
    pairs = [(sigmas[name], psi) for name, psi in psis.items()]
    assert len(pairs) == 9
    assert sum(sigma.numel() for sigma, _ in pairs) == 6_568_640
    assert all(torch.equal(psi, 0.2 * sigma) and psi.data_ptr() != sigma.data_ptr() for sigma, psi in pairs)
    for sigma, _ in pairs:
        fan_in = sigma[0].numel()
        assert float(sigma.detach().std()) == pytest.approx(fan_in**-0.5, rel=0.03)
        assert float(sigma.abs().max()) < 2.01 * fan_in**-0.5 / 0.8796
    plain = CNN(width=4, norm="batch", num_classes=3, in_shape=(1, 8, 8)).eval()
    kept = Decomposed(CNN(width=4, norm="batch", num_classes=3, in_shape=(1, 8, 8)), 1.0, variance_scaling=False)
    assert not any("norm" in name for name, _ in kept.psi.named_parameters())
    kept.sigma.load_state_dict(plain.state_dict())
    with torch.no_grad():
        sigmas, psis = kept.parts()
        for name, psi in psis.items():
            psi.copy_(sigmas[name].mul_(0.75) / 3)
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(kept.eval()(x), plain(x))
