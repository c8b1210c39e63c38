"""Runs survive clients without images, with one image and with one class, and rounds in which all are rejected."""

from __future__ import annotations

import copy
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest
from lightning_fedssl.models.layers import NormKind, StaticBatchNorm2d, make_norm
from lightning_fedssl.models.network import accept_single_values
from tests.algorithms.helpers import METHODS
from tests.toy import labeled_clients, toy_fedavg, toy_trainer, weights

TRAINERS: dict[str, dict[str, Any]] = {
    "sequential": {"clients_at_once": 1},
    "stacked": {"clients_at_once": 4},
}


class Odd(Partition):
    """Client 0 has no image, client 1 has one, client 2 has one class; the others have what a rule assigns.

    Args:
        rule: The rule.
    """

    def __init__(self, rule: Partition) -> None:
        self.rule = rule

    def split(self, asked: SplitRequest, generator: Any) -> FederatedSplit:
        whole = self.rule.split(asked, generator)
        clients, none = list(whole.clients), torch.zeros(0, dtype=torch.int64)
        clients[0] = ClientIndices(none, none)
        clients[1] = ClientIndices(
            clients[1].labeled[:1], none if len(clients[1].labeled) else clients[1].unlabeled[:1]
        )
        for_class = asked.labels[torch.cat([*clients[2]])].mode().values
        clients[2] = ClientIndices(*(part[asked.labels[part] == for_class] for part in clients[2]))
        return FederatedSplit(whole.seed, whole.server_labeled, clients)


def run(folder: Path, method: str, trainer: str, algorithm: Any, data: Any) -> Any:
    made = toy_trainer(folder, clients_per_round=4, max_rounds=2, logger=False, **TRAINERS[trainer])
    made.fit(algorithm, data)
    assert made.round_index == 2
    assert all(t.isfinite().all() for t in weights(algorithm).values())
    return made


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_survives_clients_without_images_with_one_and_with_one_class(
    tmp_path: Path, method: str, trainer: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, data = METHODS[method]
    algorithm, odd = make(), data()
    odd.partition = Odd(odd.partition)
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        made = run(tmp_path, method, trainer, algorithm, odd)
    assert caplog.text.count("1 of 4 clients have no image and skip every round (0); change data.partition") == 1
    assert [len(part) for part in odd.split.clients[0]] == [0, 0]
    assert sum(len(part) for part in odd.split.clients[1]) == 1
    assert "client/refused" not in made.callback_metrics
    assert math.isfinite(float(made.callback_metrics["test/loss"]))


class OnePixel(nn.Sequential):
    """Batch norm in a layer of 1x1 pixels, where a batch of one image has no variance."""

    def __init__(self, kind: NormKind = "batch") -> None:
        super().__init__(nn.Conv2d(1, 4, 8), make_norm(kind, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("kind", ["batch", "static_batch"])
def test_batch_norm_trains_on_one_image(tmp_path: Path, trainer: str, kind: NormKind) -> None:
    algorithm, data = toy_fedavg(network=partial(OnePixel, kind)), labeled_clients(client_batch_size=9)
    data.partition = Odd(data.partition)
    made = run(tmp_path, "", trainer, algorithm, data)
    assert float(made.callback_metrics["client/trained"]) == 3


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (nn.BatchNorm1d, (1, 2)),
        (nn.BatchNorm2d, (1, 2, 1, 1)),
        (nn.BatchNorm3d, (1, 2, 1, 1, 1)),
        (nn.SyncBatchNorm, (1, 2)),
        (lambda n: pytest.importorskip("timm.layers").BatchNormAct2d(n, apply_act=False), (1, 2, 1, 1)),
        (StaticBatchNorm2d, (1, 2, 1, 1)),
    ],
)
def test_batch_norm_of_a_single_value_uses_the_buffers(make: Any, shape: tuple[int, ...]) -> None:
    layer, other = make(2), make(2)
    accept_single_values(layer)
    layer = copy.deepcopy(layer)
    layer.running_mean.copy_(torch.tensor([1.0, 2.0]))
    layer.running_var.fill_(4.0)
    found = layer(torch.tensor([3.0, 4.0]).reshape(shape)).flatten()
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0]), rtol=1e-5, atol=1e-5)
    assert layer.training
    assert not getattr(layer, "num_batches_tracked", None)
    more = torch.rand(2, *shape[1:])
    assert torch.equal(layer(more), other(more))
