"""The optimality gap of Fed-SHVR's Eq. 21, against the definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.diagnostics.optimality_gap import OptimalityGap
from torch.nn import functional as F

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.losses import kl_from_uniform, soft_cross_entropy
from lightning_fedssl.functional.pseudo_labels import sharpen
from tests.algorithms.helpers import toy_shvr, uneven_clients
from tests.toy import toy_trainer


class Note(FederatedCallback):
    """Keeps the weights of the rounds and what was logged."""

    def __init__(self) -> None:
        self.received: list[dict[str, torch.Tensor]] = []
        self.rows: list[dict[str, float]] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.received.append({name: t.clone() for name, t in algorithm.server.model().items()})

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.rows.append({k.partition("/")[2]: v for k, v in metrics.items() if k.startswith("optimality/")})


def test_the_gap_is_the_squared_gradient_and_the_change_of_labels(tmp_path: Path) -> None:
    note = Note()
    given: dict[str, Any] = {"clients_per_round": 4, "precision": "64-true", "callbacks": [OptimalityGap(), note]}
    toy_trainer(tmp_path, **given).fit(toy_shvr(alpha0=0.5), uneven_clients())

    data, model = uneven_clients(), toy_shvr(alpha0=0.5)
    data.setup()
    model.configure_model()
    model.double().eval()
    before: dict[int, torch.Tensor] = {}
    for row, weights in zip(note.rows, note.received, strict=True):
        model.load_state_dict(weights, strict=False)
        objective, change, size = torch.zeros((), dtype=torch.float64), 0.0, 0
        for k in range(4):
            local = data.local_data(k, 1, torch.float64)
            count = len(local.labeled) + len(local.unlabeled)
            x, u = model(local.plain(local.labeled)), model(local.plain(local.unlabeled))
            v = sharpen(u.detach(), 0.5, 0.75)
            r1 = (v * v.log()).sum(dim=1).mean() + math.log(3)
            own = F.cross_entropy(x, local.labels) + 0.5 * soft_cross_entropy(u, v).mean()
            objective = objective + count * (own + 0.75 * r1 + 0.1 * kl_from_uniform(u).mean())
            change += count * float((v - before.get(k, v)).square().sum())
            before[k], size = v, size + count
        gradient = torch.autograd.grad(objective / size, list(model.parameters()))
        squared = sum(float(g.square().sum()) for g in gradient)
        expected = {"objective": objective.item() / size, "gradient": squared, "labels": change / size}
        assert row == pytest.approx(expected | {"gap": squared + change / size}, rel=1e-9)
    assert [row["labels"] > 0 for row in note.rows] == [False, True, True]
