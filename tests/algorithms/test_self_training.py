from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl import Experiment
from lightning_fedssl.data import Dirichlet, Iid, Partition
from lightning_fedssl.functional.class_shares import STEPS
from lightning_fedssl.models import MLP
from tests.algorithms.helpers import STATED, fitted, toy_self_training
from tests.toy import ToyData

RATE, ROUNDS, DECAY = 0.1, 4, 0.01


def labels_of(data: ToyData, network: torch.nn.Module, targets: dict[int, torch.Tensor]) -> tuple[Any, Any]:
    """The soft or hard labels of all samples, client by client, and the weight of each."""
    labels, weights = [], []
    for client in range(data.num_clients):
        local = data.local_data(client, 1, torch.float64)
        p = network(local.plain(local.unlabeled)).detach().softmax(1)
        if local.shares is None:
            labels.append(F.one_hot(p.argmax(1), 3).double())
            weights.append(p.max(1).values)
            continue
        f, stated = local.shares.sureness, torch.tensor(local.shares.shares).double()
        w = (1 - 0.2 * (1 - f) / f / (stated / p.mean(0)).log() ** 2).clamp(min=f)
        blended = stated**w * p.mean(0) ** (1 - w)
        target = targets.setdefault(client, blended / blended.sum())  # what the first model says of them is kept
        for _ in range(STEPS):
            p = p * (target / p.mean(0))
            p = p / p.sum(1, keepdim=True)
        labels.append(p)
        weights.append(torch.ones(len(p)).double())
    return torch.cat(labels), torch.cat(weights)


def pooled(data: ToyData, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Self-training on all samples at once, as the method's docstring says it, from a network's weights."""
    server = data.local_data(-1, 1, torch.float64)
    x, y = server.plain(server.labeled), server.labels
    u = server.plain(torch.cat([client.unlabeled for client in data.split.clients]))
    sure = sum(shares.sureness for shares in data.shares.values()) / data.num_clients
    share, momentum = 0.5 - 0.4 * sure, 0.9 if data.shares else 0.0
    steps = [torch.zeros_like(w) for w in network.parameters()]
    targets: dict[int, torch.Tensor] = {}
    for _ in range(ROUNDS):
        labels, c = labels_of(data, network, targets)
        unlabeled_loss = (c * F.cross_entropy(network(u), labels, reduction="none")).sum() / c.sum()
        loss = share * F.cross_entropy(network(x), y) + (1 - share) * unlabeled_loss
        grads = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for w, g, step in zip(network.parameters(), grads, steps, strict=True):
                step.mul_(momentum).sub_(RATE * (g + DECAY * w))
                w.add_(step)
    return {f"network.{name}": w.detach() for name, w in network.named_parameters()}


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.1, min_size=1)])
@pytest.mark.parametrize("clients_at_once", [1, 3])
@pytest.mark.parametrize("class_shares", [None, STATED, {"of": "sites"}])
def test_it_is_pooled_self_training_whatever_the_partition(
    tmp_path: Path, partition: Partition, clients_at_once: int, class_shares: Any
) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, weight_decay=DECAY)

    settings: dict[str, Any] = {"num_clients": 6, "server_batch_size": 99, "weak": "none", "strong": "none"}
    data = ToyData(partition=partition, class_shares=class_shares, **settings)
    made: dict[str, Any] = {"optimizer": sgd, "network": partial(MLP, hidden=())}
    method = toy_self_training(**made)
    run: dict[str, Any] = {"max_rounds": ROUNDS, "clients_at_once": clients_at_once}
    trained = fitted(tmp_path, method, data, **run)
    start = toy_self_training(**made)
    start.configure_model()
    start.double().on_run_start(data.local_data(-1, 0, torch.float64))
    for name, expected in pooled(data, start.network).items():
        assert torch.allclose(trained[name], expected, atol=1e-6), name
    sizes = data.statistics.sizes
    assert int(sizes.max()) > 2 * int(sizes.min()) or isinstance(partition, Iid)


def test_an_optimizer_whose_step_is_no_gradient_is_refused() -> None:
    adam = partial(torch.optim.Adam, lr=0.01)
    for key in ("optimizer", "server_optimizer"):
        with pytest.raises(ValueError, match=rf"model\.{key} is Adam, .* use SGD without momentum"):
            toy_self_training(**{key: adam})


@pytest.mark.parametrize("preset", ["signals", "pretrained_images"])
def test_a_configuration_keeps_the_phase_and_the_one_step_of_the_server(preset: str) -> None:
    named = {"data.dataset": "digits", "data.num_labels": 20, "data.backbone": None}
    method: Any = Experiment.from_config(f"presets/{preset}.yaml", named, {}).model
    assert (method.server_phase, method.server_steps, method.init_head) == ("parallel", 1, "labels")
