"""Batch norm of stacked clients is that of each client alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lightning_fedssl.functional.stacked_layers import StackedLayers

CASES = [case for case in itertools.product((True, False), repeat=3) if case[0] or case[1]]


@pytest.mark.parametrize(("training", "running", "affine"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norm_of_stacked_clients_is_that_of_each(
    dtype: torch.dtype, training: bool, running: bool, affine: bool
) -> None:
    """Values, gradients and running statistics, which have 32 bits in mixed precision."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(3, 8, 4, 5, 5, generator=generator).to(dtype)
    weight, bias, factor = (torch.rand(3, *shape, generator=generator) for shape in ((4,), (4,), (8, 4, 5, 5)))
    inputs = [x, weight.to(kept), bias.to(kept)] if affine else [x]

    def normalise(
        x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        return F.batch_norm(x, mean if running else None, var if running else None, weight, bias, training, 0.1)

    def results(stacked: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        statistics = [torch.zeros(3, 4, dtype=kept), torch.ones(3, 4, dtype=kept)]
        given = (leaves[0], *statistics, *leaves[1:])
        if stacked:
            with StackedLayers():
                out = vmap(normalise)(*given)
        else:
            out = torch.stack([normalise(*row) for row in zip(*given, strict=True)])
        (out * factor.to(dtype)).sum().backward()
        return [out, *statistics, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found, expected = results(True), results(False)
    assert len(found) == len(inputs) + 3
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4)])
@pytest.mark.parametrize("shared", [True, False])
def test_a_norm_has_the_gradients_of_each_client_also_by_func_grad(layer: nn.Module, shared: bool) -> None:
    """A layer that all clients share, too."""
    names = [name for name, _ in layer.named_parameters()]
    weights = [torch.rand(4) if shared else torch.rand(3, 4) for _ in names]
    x, factor = torch.randn(3, 8, 4, 5, 5), torch.randn(3, 8, 4, 5, 5)

    def loss(weights: list[Tensor], x: Tensor, factor: Tensor) -> Any:
        out = functional_call(layer, dict(zip(names, weights, strict=True)), (x,))
        return (out * factor).sum()

    rule = (None if shared else 0, 0, 0)
    with StackedLayers():
        found = vmap(grad(loss, (0, 1)), rule)(weights, x, factor)
    for client in range(3):
        own = weights if shared else [w[client] for w in weights]
        expected = grad(loss, (0, 1))(own, x[client], factor[client])
        torch.testing.assert_close(found[1][client], expected[1])
        torch.testing.assert_close([g[client] for g in found[0]], expected[0])
