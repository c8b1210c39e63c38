"""SAGE: pseudo-labels corrected by the gap between a client's confidence and the global model's."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithms import SAGE
from lightning_fedssl.algorithms.sage import corrected_labels
from lightning_fedssl.models import CNN
from tests.algorithms.helpers import (
    HandData,
    LabeledSteps,
    fitted,
    hand_gradient,
    mixed_clients,
    plain_sgd,
    started,
    toy_fixmatch,
    toy_sage,
)
from tests.toy import Line, toy_fedavg, toy_trainer


def logits_of(confidence: float, label: int) -> list[float]:
    """Of two classes."""
    gap = math.log(confidence / (1 - confidence))
    return [gap, 0.0] if label == 0 else [0.0, gap]


def test_targets_by_hand() -> None:
    """tau 0.8 and a gap of 0.1 that halves the share: both confident, one of the two, none; both of one class."""
    own = torch.tensor([logits_of(*case) for case in ((0.9, 0), (0.7, 0), (0.9, 0), (0.7, 0), (0.99, 1))])
    other = torch.tensor([logits_of(*case) for case in ((0.8, 1), (0.95, 1), (0.6, 1), (0.75, 1), (0.89, 1))])
    found = corrected_labels(own, other, threshold=0.79, kappa=math.log(2) / 0.1)
    expected = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.125, 0.875], [0.0, 1.0], [0.0, 1.0]])
    torch.testing.assert_close(found.labels, expected)
    torch.testing.assert_close(found.confidence, torch.tensor([0.9, 0.95, 0.9, 0.75, 0.99]))
    assert found.mask.tolist() == [True, True, True, False, True]


class LabeledHand(HandData):
    """One labelled and one unlabelled image at the only client."""

    def __init__(self) -> None:
        super().__init__(num_clients=1, label_location="clients", client_batch_size=5)


def test_a_round_worked_out_by_hand(tmp_path: Path) -> None:
    """Two steps on all labelled images and, without labels, on all images; after the first the models disagree."""
    data, lr, tau, half_gap = LabeledHand(), 4, 0.6, 0.1
    algorithm = SAGE(
        network=lambda: Line(0.9, 0.1), optimizer=lambda p: torch.optim.SGD(p, lr=lr), threshold=tau,
        half_gap=half_gap, client_steps=2, num_classes=2, in_shape=(1, 4, 4),
    )  # fmt: skip
    toy_trainer(tmp_path, max_rounds=1, clients_per_round=1, precision="64-true", logger=False).fit(algorithm, data)

    def bright(w: float, b: float, x: float) -> float:
        return 1 / (1 + math.exp(w * x - b))

    w_g, b_g = float(torch.tensor(0.9)), float(torch.tensor(0.1))
    w, b = w_g, b_g
    client = data.split.clients[0]
    labeled, everything = client.labeled.tolist(), client.unlabeled.tolist() + client.labeled.tolist()
    assert (len(labeled), len(everything)) == (2, 4)
    mixed = 0
    for _ in range(2):
        g_w, g_b = 0.0, 0.0
        for i in labeled:
            d_w, d_b = hand_gradient(w, b, data.mean_input(i), i % 2)
            g_w, g_b = g_w + d_w / 2, g_b + d_b / 2
        for x in map(data.mean_input, everything):
            p, p_g = bright(w, b, x), bright(w_g, b_g, x)
            c, c_g = max(p, 1 - p), max(p_g, 1 - p_g)
            share = 2 ** (-abs(c - c_g) / half_gap) if c >= tau else 0.0
            target = share * (p > 0.5) + (1 - share) * (p_g > 0.5)
            mixed += 0 < target < 1
            if max(c, c_g) >= tau:
                g_w, g_b = g_w + (target - p) * x / 4, g_b + (p - target) / 4
        w, b = w - lr * g_w, b - lr * g_b
    assert algorithm.server.parameters["network.w"].item() == pytest.approx(w, abs=1e-12)
    assert algorithm.server.parameters["network.b"].item() == pytest.approx(b, abs=1e-12)
    assert mixed


def test_labelled_images_are_among_those_without_labels_and_count_once() -> None:
    work, local = started(toy_sage(client_epochs=2), mixed_clients(client_batch_size=4))
    images = len(local.labeled) + len(local.unlabeled)
    assert work.num_samples == images
    assert work.num_steps == 2 * (images // 4)
    assert {len(batch["x_weak"]) for batch in work} == {8}
    assert {len(batch["y"]) for batch in work} == {4}
    alone, _ = started(toy_sage(client_steps=3), mixed_clients(num_labels=104, client_batch_size=4))
    assert len(alone.batch(0)["x_weak"]) == 8  # the client has one or two images that are not labelled


def test_target_is_that_of_the_received_model_in_evaluation_mode() -> None:
    algorithm = toy_sage(threshold=0.0, half_gap=1e-9)
    work, _ = started(algorithm, mixed_clients())
    batch = work.batch(0)
    with torch.no_grad():
        for w in algorithm.network.parameters():
            w.add_(0.3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(0)))
    algorithm.train()
    pseudo = algorithm.label(algorithm(batch["x_weak"]).detach(), batch["x_weak"])
    copy = toy_sage()
    copy.configure_model()
    expected = copy.eval()(batch["x_weak"]).argmax(1)
    assert torch.equal(pseudo.labels.argmax(1), expected)


def test_without_a_gap_and_with_an_unsure_received_model_it_is_fixmatch(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, theirs = toy_sage(half_gap=math.inf, threshold=0.4), toy_fixmatch(network=toy_sage().network_factory)
    work, _ = started(algorithm, mixed_clients())
    theirs.configure_model()
    theirs.server = algorithm.server
    monkeypatch.setattr(algorithm.received["network"], "forward", lambda x: torch.zeros(len(x), 3))
    losses: list[Any] = [method.train().training_step(work.batch(0), 0) for method in (algorithm, theirs)]
    torch.testing.assert_close(losses[0], losses[1])
    pseudo = algorithm.label(algorithm(work.batch(0)["x_weak"]), work.batch(0)["x_weak"])
    assert pseudo.mask.any()


def test_received_model_has_measured_statistics_where_they_are_static(tmp_path: Path) -> None:
    algorithm = toy_sage(network=partial(CNN, width=4, norm="static_batch"))
    fitted(tmp_path, algorithm, mixed_clients(), max_rounds=1)
    measured = [buffer for name, buffer in algorithm.received.named_buffers() if name.endswith("running_mean")]
    assert measured
    assert all(buffer.any() for buffer in measured)


def test_without_weight_of_the_unlabelled_images_it_is_fedavg_on_the_labels(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": plain_sgd, "client_weighting": "uniform"}
    plain = fitted(tmp_path, LabeledSteps(**dict(toy_fedavg(**settings).hparams)), mixed_clients())
    algorithm = toy_sage(unlabeled_weight=0.0, client_steps=7, network=toy_fedavg().network_factory, **settings)
    ours: dict[str, Tensor] = fitted(tmp_path, algorithm, mixed_clients())
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


def test_loss_by_hand() -> None:
    algorithm = toy_sage(unlabeled_weight=0.5)
    work, _ = started(algorithm, mixed_clients())
    batch = work.batch(0)
    algorithm.network.requires_grad_(True)
    algorithm.eval()
    logits = {name: algorithm(batch[name]) for name in ("x", "x_weak", "x_strong")}
    pseudo = algorithm.label(logits["x_weak"].detach(), batch["x_weak"])
    p = logits["x_strong"].softmax(1)
    kl = [
        sum(t * (t / q).log() for t, q in zip(target, row, strict=True) if t > 0)
        for target, row, kept in zip(pseudo.labels, p, pseudo.mask, strict=True)
        if kept
    ]
    expected = F.cross_entropy(logits["x"], batch["y"]) + 0.5 * sum(kl) / len(p)
    torch.testing.assert_close(algorithm.training_step(batch, 0), expected)
