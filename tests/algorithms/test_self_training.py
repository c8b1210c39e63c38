from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl import Experiment
from lightning_fedssl.data import Dirichlet, Iid, Partition
from lightning_fedssl.models import MLP
from tests.algorithms.helpers import fitted, toy_self_training
from tests.toy import ToyData

RATE, ROUNDS, DECAY = 0.1, 4, 0.01


def pooled(data: ToyData, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Self-training on all samples at once, as the method's docstring says it, from a network's weights."""
    server = data.local_data(-1, 1, torch.float64)
    x, y = server.plain(server.labeled), server.labels
    u = server.plain(data.unlabeled_pool())
    for _ in range(ROUNDS):
        c, guess = network(u).softmax(1).detach().max(1)
        unlabeled_loss = (c * F.cross_entropy(network(u), guess, reduction="none")).sum() / c.sum()
        loss = (F.cross_entropy(network(x), y) + unlabeled_loss) / 2
        grads = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for w, g in zip(network.parameters(), grads, strict=True):
                w.sub_(RATE * (g + DECAY * w))
    return {f"network.{name}": w.detach() for name, w in network.named_parameters()}


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.1, min_size=1)])
@pytest.mark.parametrize("clients_at_once", [1, 3])
def test_it_is_pooled_self_training_whatever_the_partition(
    tmp_path: Path, partition: Partition, clients_at_once: int
) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, weight_decay=DECAY)

    data = ToyData(partition=partition, num_clients=6, server_batch_size=99, weak="none", strong="none")
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
