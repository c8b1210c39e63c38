"""On the emulated CUDA device a recording replays its operations in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedssl.functional import recorded
from lightning_fedssl.functional.batch_norm import batch_moments
from lightning_fedssl.functional.recorded import Recorded, Values
from lightning_fedssl.models import CNN
from tests.emulated_cuda.device import EmulatedTensor, Graph, emulated_cuda


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """The graphs that were replayed."""
    found: list[Graph] = []
    replay = Graph.replay

    def noted(graph: Graph) -> None:
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(Graph, "replay", noted)
    monkeypatch.setattr(recorded, "_refused", set())
    with emulated_cuda(), torch.no_grad():
        yield found


def running_sum(total: Tensor, read: Any = lambda t: t) -> Recorded:
    def add(inputs: dict[str, Tensor], number: int | Tensor) -> Values:
        total.add_(read(inputs["x"]).sum() * (number + 1))
        return [(total * 2, "double", 2), (inputs["x"].flip(0), "flipped", len(inputs["x"]))]

    return Recorded(add, "the sum")


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_a_recording_computes_what_the_calls_would(
    replays: list[Graph], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Batches of 3 and 2 are recorded separately; results stay as they are at later calls."""
    monkeypatch.setenv("FEDSSL_RECORD", wanted)
    total, results, expected, state = torch.zeros((), device="cuda"), [], [], 0.0
    call = running_sum(total)
    for number in range(12):
        x = torch.rand(3 if number % 3 else 2)
        results.append(call({"x": EmulatedTensor(x)}, number))
        state += float(x.sum()) * (number + 1)
        expected.append((2 * state, x.flip(0), len(x)))
    for ((double, *_), (back, name, count)), (value, flipped, size) in zip(results, expected, strict=True):
        assert double.item() == pytest.approx(value, rel=1e-6)
        assert torch.equal(back.cpu(), flipped)
        assert (name, count) == ("flipped", size)
    assert len(set(replays)) == (2 if wanted == "1" else 0)
    assert len(replays) == (8 if wanted == "1" else 0)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda t: t * bool(t.sum() > 0), "reads a value of the GPU"),
        (lambda t: t + torch.zeros(1).to(t.device), "not permitted when stream is capturing"),
    ],
)
def test_what_cannot_be_recorded_is_called_after_one_warning(
    replays: list[Graph], caplog: pytest.LogCaptureFixture, read: Any, reason: str
) -> None:
    for _ in range(2):
        total = torch.zeros((), device="cuda")
        call = running_sum(total, read)
        for number in range(5):
            call({"x": EmulatedTensor(torch.ones(3))}, number)
        assert total.item() == 3 * (1 + 2 + 3 + 4 + 5)
    assert not replays
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_a_number_of_the_host_that_changes_is_not_recorded(replays: list[Graph]) -> None:
    total = torch.zeros((), device="cuda")

    def add(inputs: dict[str, Tensor], number: int | Tensor) -> Values:
        total.add_(inputs["x"].sum() * inputs["factor"])
        return []

    call = Recorded(add, "the sum")
    for number in range(5):
        call({"x": EmulatedTensor(torch.ones(2)), "factor": torch.tensor(float(number))}, number)
    assert total.item() == 2 * (0 + 1 + 2 + 3 + 4)
    assert not replays


@pytest.mark.parametrize(("free", "recorded"), [(1, 0), (2, 2)])
def test_nothing_is_recorded_where_less_than_a_quarter_of_the_memory_is_free(
    replays: list[Graph], monkeypatch: pytest.MonkeyPatch, free: int, recorded: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 8))
    call = running_sum(torch.zeros((), device="cuda"))
    for number in range(10):
        call({"x": EmulatedTensor(torch.rand(2 + number % 2))}, number)
    assert len(set(replays)) == recorded


def test_a_recording_lasts_as_long_as_its_key(replays: list[Graph]) -> None:
    total, factor = torch.zeros((), device="cuda"), [1.0]

    def add(inputs: dict[str, Tensor], number: int | Tensor) -> Values:
        total.add_(inputs["x"].sum() * factor[0])
        return [(total, "total", 1)]

    call = Recorded(add, "the sum")
    for key in (1.0, 1.0, 2.0):
        call.keep_while(key)
        factor[0] = key
        for number in range(4):
            call({"x": EmulatedTensor(torch.ones(2))}, number)
    assert total.item() == 2 * 4 * (1 + 1 + 2)
    assert len(set(replays)) == 2


def test_batch_norm_is_measured_by_a_recording(replays: list[Graph]) -> None:
    network = CNN(num_classes=3, in_shape=(1, 8, 8), width=4, norm="static_batch")
    batches = [torch.rand(6, 1, 8, 8) for _ in range(5)]
    expected = batch_moments(network, batches)
    network._apply(EmulatedTensor)  # type: ignore[no-untyped-call]
    found = batch_moments(network, [EmulatedTensor(batch) for batch in batches])
    assert len(replays) == 3
    for name, moments in expected.items():
        assert [m.count for m in found[name]] == [m.count for m in moments]
        assert all(torch.equal(a.mean.cpu(), b.mean) for a, b in zip(found[name], moments, strict=True))
        assert all(torch.equal(a.variance.cpu(), b.variance) for a, b in zip(found[name], moments, strict=True))
