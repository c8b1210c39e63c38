"""What is done to dictionaries of tensors."""

from __future__ import annotations

import torch

from lightning_fedssl.functional.by_name import stacked


def test_a_stack_keeps_kernels_with_the_channels_last() -> None:
    kernels = [torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    found = stacked([{"kernel": kernel} for kernel in kernels])["kernel"]
    assert torch.equal(found, torch.stack(kernels))
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in found)
