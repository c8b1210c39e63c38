from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import Supervised
from lightning_fedssl.state import ServerState
from tests.toy import ToyData, toy_semifl


@pytest.fixture
def per_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    return importlib.import_module("per_class")


def test_shares_by_hand(per_class: Any) -> None:
    hits, classes = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 2, 2])
    first, missing, last = per_class.shares(hits, classes, 3)
    assert (first, last) == (50.0, 100.0)
    assert missing != missing  # NaN: no entry


def test_table_agrees_with_the_evaluation_and_with_the_clients_own_labels(per_class: Any) -> None:
    data = ToyData(weak="none")
    data.setup()
    model = toy_semifl()
    model.configure_model()
    model.server = ServerState.of(model)
    model.threshold = float(model.label_images(data.local_data(0, 1)).confidence.median())
    rows = per_class.table(model.eval(), data)
    batches = list(data.evaluation_batches("test"))
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    assert sum(rows["test accuracy"]) / 3 == pytest.approx(100 * right / 60)  # 20 images of each class
    clients = [data.local_data(client, 1) for client in range(4)]
    labels = [model.label_images(client) for client in clients]
    truth = torch.cat([data.true_labels(client.unlabeled) for client in clients])
    mask = torch.cat([label.mask for label in labels])
    confident = [100 * float(mask[truth == k].double().mean()) for k in range(3)]
    assert rows["labelled with confidence"] == pytest.approx(confident)
    assert 0 < sum(confident) < 300


def test_without_unlabelled_images_there_is_accuracy_alone(per_class: Any) -> None:
    data = ToyData(num_labels="all")
    data.setup()
    toy = toy_semifl()
    model = Supervised(network=toy.network_factory, num_classes=3, in_shape=(1, 8, 8))
    model.configure_model()
    assert list(per_class.table(model.eval(), data)) == ["test accuracy"]
