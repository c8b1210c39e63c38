"""Stacked clients in the memory of a run train as sequential ones do; here on a CPU, where nothing is recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.optimizer_states import set_learning_rate
from lightning_fedssl.functional.recorded import Recorded
from lightning_fedssl.local_training import LocalTraining, stack_memory
from lightning_fedssl.local_training.stacked_step import StackedStep
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch
from tests.local_training.helpers import SGD, Federation, assert_agree, clients_of, make


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_memory, "KIND", "cpu")


class Corrected(FedAvg):
    """Client 1 has a control variate in its weights, the others none."""

    same_step_every_round = True

    def on_client_start(self, data: LocalData) -> LocalWork:
        weights = {name: 0.1 * p.detach().sign() for name, p in self.named_parameters() if data.party == 1}
        return replace(super().on_client_start(data), control_variate=weights)


SIZES = ((23, 40, 0, 4, 14), (40, 7, 12, 0, 9), (3, 3, 22, 40, 11))
"""Images of each client in three rounds, in batches of 5."""


@pytest.mark.parametrize(
    ("method", "network", "optimizer"),
    [
        (SemiFL, "cnn bn", SGD),
        (Corrected, "resnet9 gn", partial(torch.optim.SGD, lr=0.05)),
        (FedAvg, "mlp", SGD),
    ],
)
def test_rounds_of_clients_that_differ(
    method: type[FederatedAlgorithm], network: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of five rows or of one; tensors stay where they are while learning rates and clients change."""
    calls: Counter[int] = Counter()
    step = StackedStep.__call__

    def counted(self: StackedStep, parts: Any, number: Any) -> Any:
        calls[len(parts[0][0])] += len(parts)
        return step(self, parts, number)

    monkeypatch.setattr(StackedStep, "__call__", counted)
    federations = [Federation(make(method, network, optimizer=optimizer, keep_client_optimizer=True)) for _ in range(2)]
    training, places = LocalTraining(5), []
    for number, sizes in enumerate(SIZES, 1):
        for federation in federations:
            set_learning_rate(federation.optimizer, 1 / number)
        clients = clients_of(sizes, round_=number)
        together = federations[0].train(clients, training=training)
        assert_agree(federations[1].train(clients), together, 1e-12)
        rows = training.memory.rows
        assert rows is not None
        places.append([t.data_ptr() for t in (*rows.tensors.values(), *rows.momenta.values())])
    assert places[0] == places[1] == places[2]
    assert not training.refusal
    assert calls.keys() == {1, 5}
    assert calls[5] > calls[1] > 10


class Item(FedAvg):
    """Reads the number of the step, which a recording could not."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self(batch["x"]), batch["y"]) * (2 if batch_idx else 1)


class Own(FedAvg):
    """Says nothing about its step."""


def test_a_step_that_cannot_be_recorded_trains_in_a_stack_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    federations, training = [Federation(make(Item)) for _ in range(2)], LocalTraining(5)
    for _ in range(2):
        together = federations[0].train(clients_of(), training=training)
        assert_agree(federations[1].train(clients_of()), together)
    assert not training.refusal
    assert ["is not recorded" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("method", "recordings"), [(FedAvg, 1), (Own, 2)])
def test_recordings_last_for_the_run_where_a_class_itself_says_so(
    method: type[FederatedAlgorithm], recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, training, keys = Federation(make(method)), LocalTraining(5), list[object]()
    keep = Recorded.keep_while

    def noted(self: Recorded, key: object) -> None:
        keys.append(key)
        keep(self, key)

    monkeypatch.setattr(Recorded, "keep_while", noted)
    for number in (1, 2):
        federation.algorithm.current_round = replace(federation.algorithm.current_round, index=number)
        federation.train(clients_of(round_=number), training=training)
    assert len([key for i, key in enumerate(keys) if key not in keys[:i]]) == recordings
