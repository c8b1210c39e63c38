import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from lightning_fedssl.local_training.stacked_layers import StackedLayers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_of_stacked_clients_keeps_its_statistics_in_32_bits(dtype: torch.dtype) -> None:
    def normalise(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, None, True, 0.1)

    x, weight = torch.randn(3, 8, 4, 5, 5).to(dtype), torch.rand(3, 4) + 0.5
    mean, var = torch.zeros(3, 4), torch.ones(3, 4)
    ours, theirs = (mean.clone(), var.clone()), (mean.clone(), var.clone())
    with StackedLayers():
        found = vmap(normalise)(x, weight, *ours)
    expected = torch.stack([normalise(*row) for row in zip(x, weight, *theirs, strict=True)])
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours[0], mean)
