"""Steps that a CUDA graph would repeat wrongly are found with CUDA's tolerances. See ``tests/test_cuda_path.py``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.local_training.cuda_graphs import Recorder
from lightning_fedssl.state import Batch
from tests.pretend_cuda.device import Device, pretend_cuda
from tests.test_cuda_graphs import FUSED, Fixed, Moved, Numbered, on_cuda, on_device
from tests.test_vectorized import Federation, clients_of, distance, make


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(Recorder, "broken", False)
    with pretend_cuda() as now:
        yield now


class Branching(FedAvg):
    """Reads the step's number on the host."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return loss if loss is None or batch_idx == 0 else 2 * loss


class Growing(FedAvg):
    """A Python number that grows with every step; the first steps differ by less than CUDA's tolerance."""

    factor = 1.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.factor *= 1.02
        return None if loss is None else self.factor * loss


def rounds(method: type[FedAvg], count: int) -> Any:
    """Rounds over static buffers, which must give the weights of clients that train one after another."""
    reference, fixed = (on_cuda(kind(make(method, optimizer=FUSED))) for kind in (Federation, Fixed))
    for number in range(1, count + 1):
        data = on_device(clients_of(round_=number))
        expected, found = reference.train(data), fixed.train(data)
        if method is not Growing:  # one after another it grows over the clients, too
            assert distance(expected.updates, found.updates) < 1e-6
    return fixed


def test_the_number_of_a_step_is_not_recorded(device: Device) -> None:
    fixed = rounds(Numbered, 2)
    assert fixed.memory.stack is not None
    assert fixed.memory.stack.recorder.works
    assert device.replays > 10


def test_a_step_that_reads_its_number_on_the_host_is_not_recorded(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rounds(Branching, 1)
    assert "steps are not replayed as a graph" in caplog.text
    assert device.replays == 0


def test_a_number_that_moves_between_replays_is_found(caplog: pytest.LogCaptureFixture) -> None:
    rounds(Growing, 1)
    assert "replayed steps differ from executed steps" in caplog.text


def test_a_number_that_another_round_has_changed_is_found(caplog: pytest.LogCaptureFixture) -> None:
    fixed = rounds(Moved, 2)
    assert "another result in a later round than the one recorded" in caplog.text
    assert fixed.memory.refused
