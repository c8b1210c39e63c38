from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import DataSharing
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data import ClassSkew
from lightning_fedssl.schedules import Constant
from tests.algorithms.helpers import HAND_SPEC, HandData, hand_gradient, ready, sharing_data, toy_sharing
from tests.toy import Line, toy_trainer


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_every_user_trains_on_its_own_images_and_its_share(share: float, count: int) -> None:
    algorithm, data = ready(toy_sharing(share=share), sharing_data())
    server = set(data.split.server_labeled.tolist())
    drawn = []
    for client in range(4):
        local = data.local_data(client, 1)
        assert algorithm.on_client_start(local).num_samples == len(local.labeled) + count
        rows = algorithm.shared_with(local)
        assert torch.equal(rows, algorithm.shared_with(data.local_data(client, 7)))
        shared = algorithm.shared_images[rows]
        assert set(shared.tolist()) <= server
        assert len(shared.unique()) == count
        assert torch.equal(data.true_labels(shared), algorithm.shared_labels[rows])
        assert not set(shared.tolist()) & set(local.labeled.tolist())
        drawn.append(frozenset(shared.tolist()))
    assert len(set(drawn)) == (4 if 0 < share < 1 else 1)


class Phases(FederatedCallback):
    """Who trained in each round."""

    def __init__(self) -> None:
        self.rounds: list[set[str]] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.rounds.append(set())

    def on_server_phase_start(self, trainer: Any, algorithm: Any) -> None:
        self.rounds[-1].add("server")

    def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
        self.rounds[-1].add("users")


def test_the_server_trains_alone_in_the_warm_up_and_never_after_it(tmp_path: Path) -> None:
    phases = Phases()
    toy_trainer(tmp_path, max_rounds=4, callbacks=phases).fit(toy_sharing(warmup_rounds=2), sharing_data())
    assert phases.rounds == [{"server"}, {"server"}, {"users"}, {"users"}]


class HandSharing(HandData):
    """Two labelled images at the server, one at each of two users."""

    def __init__(self) -> None:
        labels = {"num_labels": "all", "label_location": "clients", "client_batch_size": 3}
        super().__init__(partition=ClassSkew(1.0, server_images=2), **labels)
        self.spec = HAND_SPEC


def test_warm_up_and_a_round_by_hand(tmp_path: Path) -> None:
    """Each user's batch is its own image and the two shared ones; users hold equally many, so the mean is plain."""
    data, lr = HandSharing(), 0.2
    algorithm = DataSharing(
        network=lambda: Line(0.5, 0.1),
        optimizer=partial(torch.optim.SGD, lr=lr),
        schedule=Constant(),
        local_steps=1,
        warmup_rounds=1,
        num_classes=2,
        in_shape=(1, 4, 4),
    )
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=2, precision="64-true", logger=False)
    trainer.fit(algorithm, data)

    def step(start: tuple[float, float], images: list[int]) -> tuple[float, float]:
        gradients = [hand_gradient(*start, data.mean_input(i), i % 2) for i in images]
        w, b = (s - lr * sum(g[k] for g in gradients) / len(images) for k, s in enumerate(start))
        return w, b

    shared = data.split.server_labeled.tolist()
    warm = step((0.5, float(torch.tensor(0.1))), shared)
    users = [step(warm, [*client.labeled.tolist(), *shared]) for client in data.split.clients]
    assert [len(client.labeled) for client in data.split.clients] == [1, 1]
    assert algorithm.server.parameters["network.w"].item() == pytest.approx((users[0][0] + users[1][0]) / 2, abs=1e-12)
    assert algorithm.server.parameters["network.b"].item() == pytest.approx((users[0][1] + users[1][1]) / 2, abs=1e-12)


def test_users_learn_and_keep_nothing(tmp_path: Path) -> None:
    algorithm = toy_sharing(share=0.5, warmup_rounds=1)
    trainer = toy_trainer(tmp_path, max_rounds=8, clients_per_round=4)
    trainer.fit(algorithm, sharing_data())
    assert float(trainer.callback_metrics["test/accuracy"]) > 0.8
    assert len(algorithm.clients) == 0
