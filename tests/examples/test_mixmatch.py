"""MixMatch and the Pi-Model: both views of an unlabelled image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from examples.mixmatch import MixMatch, PiModel
from torch.nn import functional as F

from tests.algorithms.helpers import mixed_clients, started
from tests.toy import toy, toy_trainer, weights


def test_mixmatch_s_loss_by_hand() -> None:
    algorithm = toy(MixMatch, "group", labeled_weight=2, unlabeled_weight=3, unlabeled_ratio=2)
    work, _ = started(algorithm, mixed_clients())
    batch = work.batch(1)
    with torch.no_grad():
        guesses = (algorithm(batch["x_weak"]).softmax(1) + algorithm(batch["x_strong"]).softmax(1)) / 2
    entries = [(x, F.one_hot(y, 3).float()) for x, y in zip(batch["x"], batch["y"], strict=True)]
    for name in ("x_weak", "x_strong"):  # the temperature 0.5 squares the odds
        entries += [(x, p**2 / (p**2).sum()) for x, p in zip(batch[name], guesses, strict=True)]
    assert sorted(batch["partner"].tolist()) == list(range(len(entries)))
    assert batch["ratio"].min() >= 0.5
    assert len(batch["ratio"].unique()) == len(entries)
    labeled, others = [], []
    for place, (image, target) in enumerate(entries):
        ratio, (other, others_target) = batch["ratio"][place], entries[batch["partner"][place]]
        found = algorithm((ratio * image + (1 - ratio) * other)[None]).softmax(1)[0]
        wanted = ratio * target + (1 - ratio) * others_target
        if place < len(batch["x"]):
            labeled.append(-(wanted * found.log()).sum())
        else:
            others.append((wanted - found).square().mean())
    growth = 1 / algorithm.current_round.max_rounds / 0.4
    assert growth < 1
    expected = 2 * sum(labeled) / len(labeled) + 3 * growth * sum(others) / len(others)
    torch.testing.assert_close(algorithm.training_step(batch, 1), expected)


def test_pi_model_s_loss_by_hand_pulls_one_view() -> None:
    algorithm = toy(PiModel, "group", unlabeled_weight=3)
    work, _ = started(algorithm, mixed_clients())
    batch = dict(work.batch(0))
    batch["x_weak"].requires_grad_()
    weak, strong = (algorithm(batch[name]).softmax(dim=1) for name in ("x_weak", "x_strong"))
    distance = (weak - strong).square().sum() / (3 * len(weak))
    assert distance > 0
    loss = algorithm.training_step(batch, 0)
    growth = 1 / algorithm.current_round.max_rounds / 0.4
    torch.testing.assert_close(loss, F.cross_entropy(algorithm(batch["x"]), batch["y"]) + 3 * growth * distance)
    loss.backward()
    gradient = batch["x_weak"].grad
    assert gradient is None or not gradient.any()


def test_mixmatch_s_guesses_leave_statistics_of_batch_norm_alone() -> None:
    algorithm: Any = toy(MixMatch, "batch")
    work, _ = started(algorithm, mixed_clients())
    algorithm.train()
    algorithm.training_step(work.batch(0), 0)
    counts = {int(t) for name, t in algorithm.network.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts == {1}


@pytest.mark.parametrize("method", [MixMatch, PiModel])
def test_stacked_clients_train_as_sequential_ones_do(tmp_path: Path, method: Any) -> None:
    results = []
    for number in (1, 3):
        algorithm: Any = toy(method, "batch", prox_mu=0.1)
        options: dict[str, Any] = {"clients_at_once": number, "max_rounds": 2, "precision": "64-true", "logger": False}
        trainer = toy_trainer(tmp_path, **options)
        trainer.fit(algorithm, mixed_clients(max_train_images=72))
        assert not trainer.run.local_training.refusal
        results.append(weights(algorithm))
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name], t, rtol=1e-9, atol=1e-11)
