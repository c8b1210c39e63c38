"""(FL)^2: thresholds of each client, sharpness-aware consistency, weights by learning status."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedssl.algorithms import FL2
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.models import CNN
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.task import Classification, MultiLabel, Segmentation, Task
from tests.algorithms.helpers import (
    CONFIDENT_TASKS,
    HandData,
    hand_gradient,
    loss_of,
    outcomes,
    ready,
    started,
    toy_fl2,
)
from tests.toy import (
    Line,
    ToyData,
    Transfers,
    assert_same,
    data_of,
    toy_of,
    toy_round,
    toy_semifl,
    toy_trainer,
    weights,
)


def test_pretraining_and_a_round_worked_out_by_hand(tmp_path: Path) -> None:
    """A client has one image, whose confidence is its status; the views are the image itself, T = 1."""
    data, lr, rho = HandData(), 0.2, 0.7
    algorithm = FL2(
        network=lambda: Line(0.5, 0.1),
        optimizer=partial(torch.optim.SGD, lr=lr),
        threshold=0.0,
        rho=rho,
        pretrain_epochs=1,
        client_epochs=1,
        server_epochs=1,
        gradient_clip_norm=None,
        num_classes=2,
        in_shape=(1, 4, 4),
    )
    toy_trainer(tmp_path, max_rounds=1, clients_per_round=2, precision="64-true", logger=False).fit(algorithm, data)

    labeled = [(data.mean_input(i), i % 2) for i in data.split.server_labeled.tolist()]

    def fine_tuned(w: float, b: float) -> tuple[float, float]:
        gradients = [hand_gradient(w, b, x, y) for x, y in labeled]
        return w - lr * sum(g[0] for g in gradients) / 2, b - lr * sum(g[1] for g in gradients) / 2

    def bright(w: float, b: float, x: float) -> float:
        return 1 / (1 + math.exp(w * x - b))

    w, b = fine_tuned(0.5, float(torch.tensor(0.1)))
    sums = [0.0, 0.0, 0.0]
    for client in data.split.clients:
        x = data.mean_input(int(client.unlabeled[0]))
        p = bright(w, b, x)
        g_w, g_b = hand_gradient(w, b, x, int(p > 0.5))
        norm = math.hypot(g_w, g_b)
        raised = bright(w + rho * g_w / norm, b + rho * g_b / norm, x)
        moved = w - lr * (g_w + (p - raised) * x), b - lr * (g_b + raised - p)  # KL's gradient: raised minus target
        weight = 1 - max(p, 1 - p)
        sums = [sums[0] + weight * moved[0], sums[1] + weight * moved[1], sums[2] + weight]
    w, b = fine_tuned(sums[0] / sums[2], sums[1] / sums[2])
    assert algorithm.server.parameters["network.w"].item() == pytest.approx(w, abs=1e-12)
    assert algorithm.server.parameters["network.b"].item() == pytest.approx(b, abs=1e-12)


def test_threshold_is_the_mean_confidence_scaled_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ToyData()
    data.setup()
    local = data.local_data(0, 1)
    logits = torch.randn(len(local.unlabeled), 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([1, 0, 0])
    p, algorithm = logits.softmax(1), toy_fl2()
    monkeypatch.setattr(algorithm, "label_images", lambda data: PseudoLabels(p, p.amax(1), p.amax(1) >= 0.95))
    work = algorithm.on_client_start(local)
    status, share = float(p.amax(1).mean()), p.mean(0)
    least = [status * float(share[row.argmax()] / share.max()) for row in p]
    used = [float(row.max()) >= bound for row, bound in zip(p, least, strict=True)]
    assert work.pseudo_labels is not None
    assert work.pseudo_labels.mask.tolist() == used
    assert work.num_samples == sum(used) < len(used)
    assert float(work.payload["status"]) == pytest.approx(status)
    assert {float(row.max()) >= status for row, kept in zip(p, used, strict=True) if kept} == {True, False}


@pytest.mark.parametrize("target", ["strong", "weak"])
@pytest.mark.parametrize("task", CONFIDENT_TASKS)
def test_loss_by_hand(task: Task, target: Any) -> None:
    """The second term takes sure entries alone, at weights that raise their cross-entropy most."""
    rho, eta = 0.5, 0.01
    algorithm, _ = ready(toy_of(FL2, task, consistency_target=target, rho=rho, eta=eta), data_of(task))
    algorithm.double()
    draw = torch.Generator().manual_seed(0)
    x, x_weak = torch.randn(2, 4, 1, 8, 8, generator=draw, dtype=torch.float64)
    y = torch.randint(-1, 2, {MultiLabel: (4, 3), Segmentation: (4, 8, 8)}.get(type(task), (4,)), generator=draw)
    y = y.abs() if isinstance(task, Classification) else y
    sure = (y >= 0) & (torch.arange(y.numel()).reshape(y.shape) % 3 > 0)
    weights = dict(algorithm.network.named_parameters())
    strong = outcomes(task, algorithm(x))
    own = (outcomes(task, algorithm(x_weak)) if target == "weak" else strong).detach()
    gradients = torch.autograd.grad(loss_of(strong, y)[sure].mean(), [*weights.values()])
    scales = [w.detach().abs() + eta if name.endswith("weight") else 1 for name, w in weights.items()]
    norm = sum(float((t * g).square().sum()) for t, g in zip(scales, gradients, strict=True)) ** 0.5
    loss = algorithm.training_step({"x_strong": x, "x_weak": x_weak, "y": y, "sure": sure}, 0)
    assert loss is not None
    with torch.no_grad():
        for w, t, g in zip(weights.values(), scales, gradients, strict=True):
            w.add_(rho * t**2 * g / norm)
        kl = (own.exp() * (own - outcomes(task, algorithm(x)))).sum(-1)[sure].sum() / y.numel()
    assert float(kl) > 1e-3
    assert loss.item() == pytest.approx(loss_of(strong, y)[y >= 0].mean().item() + float(kl), abs=1e-12)


def test_running_statistics_see_the_training_pass_alone() -> None:
    found: list[list[Tensor]] = []
    for rho in (0.0, 0.5):
        algorithm = toy_fl2(rho=rho, network=partial(CNN, width=4, norm="batch"))
        batch = started(algorithm, ToyData())[0].batch(0)
        algorithm.train()
        algorithm.training_step(batch, 0)
        found.append(list(algorithm.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_without_its_three_parts_it_is_semifl_without_mix_loss(tmp_path: Path) -> None:
    plain = toy_fl2(adaptive_threshold=False, rho=0.0, status_weighting=False, pretrain_epochs=0)
    theirs = toy_semifl(mix_weight=0.0)
    for algorithm in (plain, theirs):
        toy_trainer(tmp_path, max_rounds=2, logger=False).fit(algorithm, ToyData())
    assert_same(weights(plain), weights(theirs))


def test_pretraining_draws_other_batches_than_the_rounds() -> None:
    algorithm, theirs, data = toy_fl2(pretrain_epochs=1, server_epochs=1), toy_semifl(server_epochs=1), ToyData()
    data.setup()
    algorithm.current_round = toy_round(index=1)
    pretraining, first = (algorithm.on_server_start(data.local_data(-1, phase)).batch(0)["x"] for phase in (1, 2))
    assert torch.equal(first, theirs.on_server_start(data.local_data(-1, 1)).batch(0)["x"])
    assert not torch.equal(pretraining, first)
    algorithm.current_round = toy_round(index=2)
    second = algorithm.on_server_start(data.local_data(-1, 2)).batch(0)["x"]
    assert torch.equal(second, theirs.on_server_start(data.local_data(-1, 2)).batch(0)["x"])


@pytest.mark.parametrize(("status", "weight"), [(-1e9, 1.0), (0.25, 0.75), (7.0, 0.0)])
def test_no_status_gives_a_client_more_weight_than_the_whole_range(status: float, weight: float) -> None:
    update = ClientUpdate(0, {}, {}, 9, 1, {"status": torch.tensor(status)})
    assert toy_fl2().client_weight(update) == weight


@pytest.mark.parametrize(("weighting", "sent"), [(True, {"payload.status": 4}), (False, {})])
def test_a_client_sends_its_status_if_the_server_needs_it(
    tmp_path: Path, weighting: bool, sent: dict[str, int]
) -> None:
    transfers = Transfers()
    toy_trainer(tmp_path, max_rounds=1, logger=False, callbacks=[transfers]).fit(
        toy_fl2(status_weighting=weighting), ToyData()
    )
    uploads = [
        sizes for _, _, direction, sizes in transfers.seen if direction == "up" and "network.convs.0.weight" in sizes
    ]
    assert len(uploads) == 3
    for sizes in uploads:
        assert {name: size for name, size in sizes.items() if name.startswith("payload")} == sent
