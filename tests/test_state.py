"""Named tensors of a module, and the persistent state of clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.functional.optimizer_states import load_optimizer_state, optimizer_state
from lightning_fedssl.state import ClientStore, load_state
from tests.toy import assert_same


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


def test_a_state_is_loaded_also_after_a_buffer_was_replaced() -> None:
    module = Swaps()
    module(torch.zeros(1, 2))
    load_state(module, {"count": torch.tensor(7.0), "a.bias": torch.ones(2)})
    assert module.count == 7
    assert module.a.bias.tolist() == [1, 1]
    with pytest.raises(KeyError, match="nowhere"):
        load_state(module, {"nowhere": torch.ones(1)})


def state_of(value: float, size: int = 5) -> dict[str, Tensor]:
    return {"0.momentum": torch.full((size,), value), "0.step": torch.tensor(value, dtype=torch.float64)}


def test_staged_writes_are_seen_by_their_client_alone_until_they_are_committed() -> None:
    store = ClientStore()
    store.put(0, "a", state_of(1.0))
    with store.stage(0):
        store.put(0, "a", state_of(2.0))
        store.put(5, "b", state_of(3.0))
        assert_same(store.get(0, "a"), state_of(2.0))
    assert_same(store.get(0, "a"), state_of(1.0))
    with store.stage(1):
        store.put(1, "a", state_of(4.0))
        assert_same(store.get(0, "a"), state_of(1.0))
    store.discard(1)
    store.commit(1)
    store.commit(0)
    assert store.with_state("a") == [0]
    assert store.with_state("b") == [5]
    store.put(5, "b", {})
    assert len(store) == 1


def test_what_an_optimizer_kept_lies_in_memory_as_its_weight() -> None:
    """A kernel that walks through both side by side would else mix the entries up."""
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    optimizer.step()
    store = ClientStore()
    store.put(0, "optimizer", optimizer_state(optimizer))
    kept = store.get(0, "optimizer")
    load_optimizer_state(optimizer, kept)
    found = optimizer.state[weight]["momentum_buffer"]
    assert found.stride() == weight.stride()
    assert torch.equal(found, kept["0.momentum_buffer"])


def test_numbers_in_the_state_of_an_own_optimizer_keep_their_values_and_types() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept: dict[str, Any] = {"step": 2**40 + 1, "scale": 0.1, "ready": True, "average": torch.ones(2)}
    optimizer.state[weight] = {**kept, "note": "lost"}
    state = optimizer_state(optimizer)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    load_optimizer_state(optimizer, state)
    loaded = optimizer.state[weight]
    assert torch.equal(loaded.pop("average"), kept.pop("average"))
    assert loaded == kept
    assert [type(value) for value in loaded.values()] == [int, float, bool]
