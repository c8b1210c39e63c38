"""The complete files of docs/adding_a_method.md and docs/method_examples.md: taken from the page, run and checked."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.cli import main
from lightning_fedssl.models import CNN
from tests.local_training.helpers import Federation, assert_agree, clients_of
from tests.toy import ToyData, assert_same, labeled_clients, toy_fedavg, toy_round, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import StopAfter

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("adding_a_method.md", "method_examples.md"))
FILES = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', PAGES, re.DOTALL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files in a folder that modules are imported from."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def fedavg(folder: Path) -> ModuleType:
    return importlib.import_module("fedavg")


@pytest.fixture
def own_threshold(folder: Path) -> ModuleType:
    return importlib.import_module("own_threshold")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def make(method: type, **kwargs: Any) -> Any:
    network = partial(CNN, width=4, norm="group")
    return method(**{"network": network, "optimizer": sgd, "num_classes": 3, "in_shape": (1, 8, 8)} | kwargs)


def fitted(tmp_path: Path, algorithm: FederatedAlgorithm, data: ToyData, **kwargs: Any) -> dict[str, Tensor]:
    toy_trainer(tmp_path, logger=False, **kwargs).fit(algorithm, data)
    return weights(algorithm)


def test_the_configuration_of_the_page_runs(folder: Path, tmp_path: Path) -> None:
    command = ["fit", "--config", str(folder / "own.yaml"), "--trainer.fast_dev_run", "true"]
    assert main([*command, "--trainer.default_root_dir", str(tmp_path)]) == 0


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_fedavg_written_out_is_bitwise_the_built_in_one(tmp_path: Path, fedavg: ModuleType, norm: Any) -> None:
    network = partial(CNN, width=4, norm=norm)
    theirs = fitted(tmp_path, toy_fedavg(network=network, optimizer=sgd, client_epochs=2), labeled_clients())
    assert_same(fitted(tmp_path, make(fedavg.PlainFedAvg, network=network, client_epochs=2), labeled_clients()), theirs)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, own_threshold: ModuleType) -> None:
    whole, first, second = (make(own_threshold.OwnThreshold) for _ in range(3))
    toy_trainer(tmp_path / "whole").fit(whole, ToyData())
    toy_trainer(tmp_path / "parts", callbacks=StopAfter(1)).fit(first, ToyData())
    toy_trainer(tmp_path / "parts").fit(second, ToyData(), ckpt_path="last")
    assert_same(weights(second), weights(whole))
    states = second.clients.state_dict()
    assert whole.clients.state_dict()
    for client, state in whole.clients.state_dict().items():
        assert_same(states[client], state)


def test_stacked_clients_equal_sequential_ones(own_threshold: ModuleType) -> None:
    results = []
    for at_once in (1, 5):
        algorithm = make(own_threshold.OwnThreshold)
        algorithm.clients.put(1, "threshold", {"value": torch.tensor(0.36, dtype=torch.float64)})
        federation = Federation(algorithm)
        algorithm.current_round = toy_round()
        algorithm.on_round_start()
        results.append(federation.train(clients_of(), at_once))
    assert_agree(results[0], results[1])
    assert len(results[0].kept) == len(results[0].updates) > 2


def test_each_client_has_a_threshold_of_its_own_by_hand(tmp_path: Path, own_threshold: ModuleType) -> None:
    """0.9 * 0.95 + 0.1 p in the first round, with p the mean confidence of the received model."""
    algorithm, data = make(own_threshold.OwnThreshold, decay=0.9), ToyData()
    start = make(own_threshold.OwnThreshold)
    start.configure_model()
    fitted(tmp_path, algorithm, data, max_rounds=1, clients_per_round=4)
    for client in range(4):
        local = data.local_data(client, 1)
        with torch.no_grad():
            p = start.eval()(local.plain(local.unlabeled)).softmax(dim=1).amax(dim=1).mean()
        torch.testing.assert_close(algorithm.clients.get(client, "threshold")["value"], 0.855 + 0.1 * p)


def test_what_the_example_refuses_names_the_key(tmp_path: Path, own_threshold: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"model\.decay is 1: give"):
        make(own_threshold.OwnThreshold, decay=1)
    with pytest.raises(ValueError, match=r"model\.first_threshold is 1: give"):
        make(own_threshold.OwnThreshold, first_threshold=1)
    with pytest.raises(ValueError, match=r"data\.label_location to server"):
        fitted(tmp_path, make(own_threshold.OwnThreshold), labeled_clients())


def test_the_callback_logs_the_largest_number_of_confident_images(folder: Path, tmp_path: Path) -> None:
    class Watch(FederatedCallback):
        def __init__(self) -> None:
            self.counts: list[list[int]] = []

        def on_round_start(self, trainer: Any, algorithm: Any) -> None:
            self.counts.append([])

        def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
            self.counts[-1].append(int(work.pseudo_labels.mask.sum()))

    watch, own = Watch(), importlib.import_module("confident").ConfidentImages()
    trainer = toy_trainer(tmp_path, callbacks=[watch, own])
    trainer.fit(toy_semifl(), ToyData())
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        logged = [row["client/confident_max"] for row in csv.DictReader(file) if row.get("client/confident_max")]
    assert [float(value) for value in logged] == [max(counts) for counts in watch.counts]
    assert max(map(max, watch.counts)) > 0
