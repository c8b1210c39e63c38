"""The optimality gap of Fed-SHVR's Eq. 21, against the definition."""

from __future__ import annotations

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
        self.rounds: list[Any] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.rounds.append([{name: t.clone() for name, t in algorithm.server.model().items()}])

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.rounds[-1].append({k.partition("/")[2]: v for k, v in metrics.items() if k.startswith("optimality/")})


def test_the_gap_is_the_squared_gradient_and_the_change_of_labels(tmp_path: Path) -> None:
    note = Note()
    trainer = toy_trainer(tmp_path, clients_per_round=4, precision="64-true", callbacks=[OptimalityGap(), note])
    trainer.fit(toy_shvr(alpha0=0.5), uneven_clients())
    data, model = trainer.datamodule, trainer.algorithm.eval()
    before: dict[int, torch.Tensor] = {}
    for weights, row in note.rounds:
        model.load_state_dict(weights, strict=False)
        objective, change, size = torch.zeros((), dtype=torch.float64), 0.0, 0
        for k in range(4):
            local = data.local_data(k, 1, torch.float64)
            count = len(local.labeled) + len(local.unlabeled)
            x, u = model(local.plain(local.labeled)), model(local.plain(local.unlabeled))
            v = sharpen(u.detach(), 0.5, 0.75)
            r1 = (v * (3 * v).log()).sum(dim=1).mean()
            own = F.cross_entropy(x, local.labels) + 0.5 * soft_cross_entropy(u, v).mean() + 0.75 * r1
            objective = objective + count * (own + 0.1 * kl_from_uniform(u).mean())
            change += count * float((v - before.get(k, v)).square().sum())
            before[k], size = v, size + count
        squared = sum(float(g.square().sum()) for g in torch.autograd.grad(objective / size, list(model.parameters())))
        expected = {"objective": objective.item() / size, "gradient": squared, "labels": change / size}
        assert row == pytest.approx(expected | {"gap": squared + change / size}, rel=1e-9)
