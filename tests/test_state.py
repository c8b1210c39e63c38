"""Named tensors of a module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.state import LiveTensors


class Swaps(nn.Module):
    """Puts a new tensor in the place of its buffer; two layers share a weight."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        out: Tensor = self.b(self.a(x))
        return out


def test_live_tensors_are_those_of_the_module_also_after_a_buffer_was_replaced() -> None:
    module = Swaps()
    live = LiveTensors(module)
    module(torch.zeros(1, 2))
    assert list(live.parameters()) == [name for name, _ in module.named_parameters()] == ["a.weight", "a.bias"]
    assert live.buffers()["count"] is module.count
    live.load({"count": torch.tensor(7.0), "a.bias": torch.ones(2)})
    assert module.count == 7
    assert module.a.bias.tolist() == [1, 1]
    with pytest.raises(KeyError, match="nowhere"):
        live.load({"nowhere": torch.ones(1)})
