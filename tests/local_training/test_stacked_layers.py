"""Batch norm of stacked clients is that of each client alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from lightning_fedssl.local_training.stacked_layers import StackedLayers

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


def test_batch_norm_that_all_clients_share_is_stacked() -> None:
    x, weight = torch.randn(3, 8, 4, 5, 5), torch.rand(4)
    with StackedLayers():
        found = vmap(lambda x: F.batch_norm(x, None, None, weight, None, True))(x)
    torch.testing.assert_close(found, torch.stack([F.batch_norm(t, None, None, weight, None, True) for t in x]))
