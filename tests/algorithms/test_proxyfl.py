"""ProxyFL: tuned proxies, categories of unconfident images, and the prior."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.algorithms import ProxyFL
from lightning_fedssl.algorithms.proxyfl import indecisive_categories_loss
from lightning_fedssl.round import Round
from lightning_fedssl.state import ClientUpdate
from tests.algorithms.helpers import mixed_clients, ready, started, toy_proxyfl
from tests.toy import ToyData, toy_trainer


def loss_by_loops(z: Tensor, proxies: Tensor, y: Tensor, sure: list[bool], prior: Tensor, labeled: int) -> float:
    """Eq. 4 and 6 to 8, image by image."""
    categories = [
        {int(p.argmax())} if s else {c for c in range(len(p)) if p[c] > prior[c]} for p, s in zip(y, sure, strict=True)
    ]
    losses = []
    for i in range(labeled, len(z)):
        positive = {int(y[i].argmax()): 1.0} if sure[i] else {c: float(y[i, c]) for c in categories[i]}
        near = sum(weight * float(z[i] @ proxies[c]) for c, weight in positive.items())
        far = [z[i] @ z[j] for j in range(len(z)) if not categories[i] & categories[j] and z[i] @ z[j] >= 1e-6]
        losses.append(-math.log(math.exp(near) / (math.exp(near) + sum(math.exp(s) for s in far))))
    return sum(losses) / len(losses)


def test_the_contrastive_loss_is_that_of_each_image_by_itself() -> None:
    random = torch.Generator().manual_seed(0)
    z, proxies = (F.normalize(torch.randn(n, 6, generator=random).double(), dim=-1) for n in (14, 4))
    y = (2 * torch.randn(14, 4, generator=random).double()).softmax(-1)
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    sure = (y.max(-1).values > 0.6).tolist()

    found = indecisive_categories_loss(z, proxies, y, torch.tensor(sure), prior, num_labeled=4)

    assert 0 < sum(sure) < 14
    assert found.item() == pytest.approx(loss_by_loops(z, proxies, y, sure, prior, 4), abs=1e-12)


def test_a_step_of_the_tuning_by_hand() -> None:
    """Two clients, two classes, rows of one number; all rows in one step of rate 0.5."""
    algorithm = ProxyFL(network=nn.Identity, proxy_epochs=1, proxy_batch_size=4, proxy_lr=0.5)
    algorithm.current_round = Round(1)
    uploaded = torch.tensor([[[0.0], [4.3]], [[2.2], [8.0]]], dtype=torch.float64)
    mean = uploaded.mean(dim=0)  # 1.1 and 6.15, so the margin is 5.05
    gradient = [0.0, 0.0]
    for row, label in ((0.0, 0), (4.3, 1), (2.2, 0), (8.0, 1)):
        scores = [math.exp(-abs(row - mean[c].item()) - 5.05 * (c == label)) for c in (0, 1)]
        for c in (0, 1):  # d loss / d distance_c = [c is the label] - softmax_c
            slope = (c == label) - scores[c] / sum(scores)
            gradient[c] += slope * math.copysign(1, mean[c].item() - row) / 4

    tuned = algorithm.tune_proxies(mean, uploaded)

    by_hand = [m.item() - 0.5 * g for m, g in zip(mean, gradient, strict=True)]
    assert tuned.flatten().tolist() == pytest.approx(by_hand, abs=1e-12, rel=0)


def test_a_client_counts_the_labels_of_its_last_epoch() -> None:
    """With no confident pseudo-label these are the labels of the labelled batches."""
    algorithm = toy_proxyfl(threshold=1.0, client_epochs=3)
    work, local = started(algorithm, mixed_clients())
    last = range(work.num_steps - algorithm.epoch_steps(local), work.num_steps)
    expected = torch.zeros(algorithm.num_classes or 0)
    for step in range(work.num_steps):
        batch = work.batch(step)
        algorithm.training_step(batch, step)
        if step in last:
            expected += F.one_hot(batch["y"], algorithm.num_classes or 0).sum(dim=0)

    assert 0 < len(last) < work.num_steps
    assert algorithm.prior.get_buffer("counts").tolist() == expected.tolist()


def test_the_prior_is_a_moving_average_over_rounds() -> None:
    algorithm, _ = ready(toy_proxyfl(), mixed_clients())
    classes = algorithm.num_classes or 0
    weights = {name: weight.detach() for name, weight in algorithm.named_parameters()}
    counts = [torch.arange(classes).float(), torch.ones(classes)]
    updates = [ClientUpdate(k, weights, {}, 1, 1, {"counts": count}) for k, count in enumerate(counts)]

    algorithm.accumulate(updates)
    algorithm.accumulate(updates)

    share = sum(counts) / sum(counts).sum()  # type: ignore[union-attr]
    expected = 0.99**2 / classes + (1 - 0.99**2) * share
    torch.testing.assert_close(algorithm.broadcast(0)["prior.share"], expected)


def test_a_network_without_a_last_linear_layer_is_refused() -> None:
    def network(num_classes: int, **shape: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    with pytest.raises(ValueError, match=r"^model\.network: the last layer of Sequential is not linear"):
        ProxyFL(network=network, num_classes=3, in_shape=(1, 8, 8)).configure_model()


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_weights_of_16_bits_train_and_clients_without_labels_skip(tmp_path: Path, precision: Any) -> None:
    trainer = toy_trainer(tmp_path, logger=False, max_rounds=1, clients_per_round=20, precision=precision)
    trainer.fit(toy_proxyfl(), ToyData(label_location="clients", num_labels=6, num_clients=20))
    assert set(trainer.participation.values()) == {"finished", "skipped"}
