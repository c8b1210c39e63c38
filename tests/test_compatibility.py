"""How many clients fit into a device's memory: the trial runs here, with the device's answers made up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.local_training import compatibility, vectorized
from lightning_fedssl.state import ServerState
from tests.test_fedmatch import toy_fedmatch
from tests.test_fixmatch import mixed_clients
from tests.toy import ToyData, toy_semifl, toy_trainer


class Fit(FederatedCallback):
    """Asks at the start of the last round, whose clients have a history."""

    def on_round_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:
        if trainer.round_index == trainer.max_rounds:
            before = {name: t.clone() for name, t in algorithm.server.model().items()}
            data = trainer.datamodule
            clients = [data.local_data(k, trainer.round_index, trainer.dtype) for k in trainer.cohort]
            tried = compatibility.try_together(algorithm, clients)
            memory = compatibility.memory_of_stacks(algorithm, tried, trainer.client_optimizer, trainer.fabric)
            self.number = memory.largest_number()
            self.changed = [n for n, t in algorithm.server.model().items() if not torch.equal(t, before[n])]


def fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any, data: Any) -> Fit:
    """100 MiB for any number of clients, where 1,005 are free: a line of a tenth of one trial's slope."""
    free = 1005 * 2**20
    answers: dict[str, Any] = {
        "memory_allocated": 0, "max_memory_allocated": 100 * 2**20, "memory_reserved": 0, "mem_get_info": (free, free),
        "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    asked = Fit()
    toy_trainer(tmp_path, max_rounds=2, clients_at_once=1, callbacks=[asked]).fit(algorithm, data)
    assert asked.changed == []
    return asked


@pytest.mark.parametrize(
    ("make", "data"), [(toy_semifl, ToyData), (lambda: toy_fedmatch(lr_patience=1), mixed_clients)]
)
def test_whole_clients_are_tried_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, data: Any
) -> None:
    assert fitting(tmp_path, monkeypatch, make(), data()).number == (854 - 90) // 10


def test_what_a_round_holds_beside_a_stack_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four models of 25 MiB: the sum of the updates, the server's momentum and its optimizer's state."""
    monkeypatch.setattr(compatibility, "_bytes_of_model", lambda algorithm: 25 * 2**20)
    assert fitting(tmp_path, monkeypatch, toy_semifl(), ToyData()).number == (854 - 90 - 100) // 10


def test_a_trial_that_does_not_fit_gives_one_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(algorithm: Any, clients: Any, *more: Any) -> Any:
        if len(clients) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(algorithm, clients, *more)

    train = vectorized.train_in_new_memory
    monkeypatch.setattr(vectorized, "train_in_new_memory", full)
    assert fitting(tmp_path, monkeypatch, toy_semifl(), ToyData()).number == 1


def test_the_largest_client_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first client whose batch is smaller than the others' would make the line too flat or too steep."""
    stacks = []

    def note(algorithm: Any, clients: Any, *more: Any) -> Any:
        stacks.append([len(client.data.labeled) + len(client.data.unlabeled) for client in clients])
        return train(algorithm, clients, *more)

    train = vectorized._train_together
    monkeypatch.setattr(vectorized, "_train_together", note)
    fitting(tmp_path, monkeypatch, toy_fedmatch(), mixed_clients())
    sizes = {size for stack in stacks for size in stack}
    assert len(sizes) == 1
    assert sorted(map(len, stacks)) == [1, 1, 3]


def test_a_server_moves_with_all_but_the_step_counts_of_optimizers() -> None:
    server = ServerState.of(nn.BatchNorm1d(2))
    server.momentum = {"weight": torch.ones(2)}
    server.extra = {"since": {"count": torch.tensor(3)}, "optimizer 1": {"step": torch.tensor(4.0), "m": torch.ones(2)}}
    server.to(torch.device("meta"))
    moved = {**server.model(), **server.momentum, **server.extra["since"], "m": server.extra["optimizer 1"]["m"]}
    assert {t.device.type for t in moved.values()} == {"meta"}
    assert server.extra["optimizer 1"]["step"].device.type == "cpu"
