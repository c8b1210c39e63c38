"""What is done to dictionaries of tensors."""

from __future__ import annotations

import torch

from lightning_fedssl.functional.dictionaries import clone_state
from lightning_fedssl.functional.stacking import stack_by_shape, stack_states


def test_a_stack_keeps_kernels_with_the_channels_last() -> None:
    kernels = [torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    found = stack_states([{"kernel": kernel} for kernel in kernels])["kernel"]
    assert torch.equal(found, torch.stack(kernels))
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in found)


def test_states_are_stacked_into_the_memory_of_those_before() -> None:
    """Two parts with a name of one shape do not share it."""
    states = [{"x": torch.randn(5), "y": torch.randn(n)} for n in (3, 3, 2, 2)]
    first = [part for _, part in stack_by_shape(states)]
    places = [part["x"].data_ptr() for part in first]
    others = [{name: t + 1 for name, t in state.items()} for state in states]
    expected = [clone_state(part) for _, part in stack_by_shape(others)]
    second = [part for _, part in stack_by_shape(others, first)]
    assert {part["x"].data_ptr() for part in second} & {*places}
    assert all(torch.equal(part[name], t) for part, e in zip(second, expected, strict=True) for name, t in e.items())
