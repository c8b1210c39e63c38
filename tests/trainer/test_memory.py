"""Cost and memory grow with the cohort, not with the number of clients or of rounds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lightning_fedssl
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.models import MLP
from tests.toy import SPEC, ToyData, toy_semifl, toy_trainer

PACKAGE = str(Path(lightning_fedssl.__file__).parent)
CALLBACKS = str(Path(lightning_fedssl.__file__).parent.parent / "callbacks")
FORK = multiprocessing.get_context("fork")


class ManyClients(ToyData):
    """Three images and as many labels for each of many clients."""

    def __init__(self, num_clients: int, **kwargs: Any) -> None:
        more = {"num_labels": "all", "label_location": "clients", "validation": 0, "client_batch_size": 3}
        super().__init__(num_clients=num_clients, **more | kwargs)

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        labels, test = torch.arange(3 * self.num_clients) % 3, torch.arange(60) % 3
        images = torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8)
        return SPEC, ImageSplit(images, labels), ImageSplit(images[:60], test)


class Rounds(FederatedCallback):
    """Calls something when the third of four rounds begins, and something else when it has ended."""

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin, self.end = begin, end

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.round_index == 3:
            self.begin()
        elif trainer.round_index == 4:
            self.end()


def fit(tmp_path: Path, num_clients: int, callback: FederatedCallback) -> None:
    algorithm = FedAvg(network=partial(MLP, hidden=(4,)), client_epochs=1, num_classes=3, in_shape=(1, 8, 8))
    trainer = toy_trainer(tmp_path / str(num_clients), max_rounds=4, clients_per_round=10, callbacks=callback)
    trainer.fit(algorithm, ManyClients(num_clients))


def allocated_in_a_round(tmp_path: Path, num_clients: int) -> tuple[int, int]:
    """Bytes of Python and NumPy that a round has at most at a time, and that it leaves."""
    found: list[int] = []

    def end() -> None:
        left, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.extend((most, left))

    fit(tmp_path, num_clients, Rounds(tracemalloc.start, end))
    return found[0], found[1]


def test_a_round_with_ten_thousand_clients_allocates_what_one_with_a_hundred_does(tmp_path: Path) -> None:
    """But for the draw of the cohort, which may number the clients: 8 bytes each."""
    allocated_in_a_round(tmp_path, 50)  # imports
    few, many = allocated_in_a_round(tmp_path, 100), allocated_in_a_round(tmp_path, 10_000)
    assert many[0] - few[0] < 150_000
    assert many[1] - few[1] < 20_000


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


class Watch(FederatedCallback):
    """Memory of the process in MB and number of Python's objects after some rounds."""

    def __init__(self) -> None:
        self.after: dict[int, tuple[float, int]] = {}

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        if trainer.round_index in (40, 120, 200):
            gc.collect()
            self.after[trainer.round_index] = (resident(), len(gc.get_objects()))


def long_run(folder: Path, result: Any) -> None:
    watch = Watch()
    algorithm = toy_semifl(server_epochs=1, network=partial(MLP, hidden=(4,)))
    trainer = toy_trainer(folder, max_rounds=200, callbacks=watch, check_val_every_n_rounds=20, clients_per_round=2)
    trainer.fit(algorithm, ToyData(num_clients=10))
    result.send(watch.after)


def test_two_hundred_rounds_leave_memory_as_forty_do(tmp_path: Path) -> None:
    """SemiFL with kept momenta, loggers and checkpoints, in a process of its own."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=long_run, args=(tmp_path, sender))
    process.start()
    process.join()
    assert process.exitcode == 0
    after: dict[int, tuple[float, int]] = receiver.recv()
    megabytes, objects = zip(*(after[n] for n in (40, 120, 200)), strict=True)
    assert megabytes[2] - megabytes[0] < 4
    assert objects[2] - objects[0] < 200
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert len(rows) >= 200
