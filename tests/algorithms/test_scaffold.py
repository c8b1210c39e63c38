"""SCAFFOLD: its reductions to FedAvg, and its variates by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.local_work import labeled_work
from lightning_fedssl.trainer.fit_loop import draw_cohort
from tests.algorithms.helpers import plain_sgd, toy_scaffold
from tests.toy import Transfers, labeled_clients, toy_fedavg, toy_trainer, weights

RATE = 0.05


@pytest.mark.parametrize("num_clients", [1, 4])
def test_clients_that_are_all_equal_train_as_in_fedavg_and_others_do_not(tmp_path: Path, num_clients: int) -> None:
    """One client is equal to all: c = c_i. Of several, the first round is FedAvg's: all variates are 0."""
    for rounds in (1, 3):
        models = toy_scaffold(), toy_fedavg(optimizer=plain_sgd, client_weighting="uniform")
        for model in models:
            trainer = toy_trainer(
                tmp_path, max_rounds=rounds, clients_per_round=num_clients, precision="64-true", logger=False
            )
            trainer.fit(model, labeled_clients(num_clients=num_clients))
        ours, theirs = map(weights, models)
        accuracy = 0 if rounds == 1 else 1e-12
        equal = all(torch.allclose(ours[name], theirs[name], rtol=0, atol=accuracy) for name in ours)
        assert equal == (num_clients == 1 or rounds == 1)


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    """Two clients, of which one is drawn in each round, with one step: y = x - eta (g - c_i + c), c_i' = g."""
    data = labeled_clients(num_clients=2, client_batch_size=120)
    algorithm, twin, seen = toy_scaffold(), toy_scaffold(num_classes=3, in_shape=(1, 8, 8)), Transfers()
    trainer = toy_trainer(
        tmp_path, max_rounds=2, clients_per_round=1, precision="64-true", logger=False, callbacks=seen
    )
    trainer.fit(algorithm, data)
    twin.configure_model()
    twin.double()
    x = dict(twin.named_parameters())
    c = {name: torch.zeros_like(p) for name, p in x.items()}
    own = {0: c, 1: c}
    for number in (1, 2):
        (client,) = draw_cohort(trainer.run, number)
        batch = labeled_work(data.local_data(client, number, torch.float64), epochs=1).batch(0)
        g = dict(zip(x, torch.autograd.grad(F.cross_entropy(twin(batch["x"]), batch["y"]), [*x.values()]), strict=True))
        with torch.no_grad():
            for name, p in x.items():
                p.sub_(RATE * (g[name] - own[client][name] + c[name]))
        c = {name: t + (g[name] - own[client][name]) / 2 for name, t in c.items()}
        own[client] = g
    for name, p in x.items():
        torch.testing.assert_close(algorithm.server.parameters[name], p.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(algorithm.server.extra["c"][name], c[name], rtol=0, atol=1e-10)
    model = sum(t.nbytes for t in algorithm.server.model().values())
    assert {(way, sum(sizes.values())) for _, _, way, sizes in seen.seen} == {("down", 2 * model), ("up", 2 * model)}


def test_momentum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.optimizer is SGD, but SCAFFOLD's .*: use SGD without momentum"):
        toy_scaffold(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
