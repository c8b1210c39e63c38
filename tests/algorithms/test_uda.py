"""FedAvg and FedProx with UDA at the clients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.algorithms.helpers import fitted, mixed_clients, started, toy_fixmatch, toy_uda
from tests.toy import ToyData, toy_round


def test_loss_by_hand() -> None:
    algorithm = toy_uda(labeled_weight=10.0, unlabeled_weight=0.5, temperature=0.5)
    work, _ = started(algorithm, mixed_clients())
    batch = work.batch(0)
    weak = algorithm(batch["x_weak"]).softmax(dim=1).detach()
    algorithm.threshold = float(weak.amax(dim=1).sort().values[1:3].mean())
    strong = algorithm(batch["x_strong"]).softmax(dim=1)
    expected = torch.tensor(0.0)
    for p, q in zip(weak, strong, strict=True):
        if p.max() >= algorithm.threshold:
            target = p**2 / (p**2).sum()  # the temperature 0.5 squares the odds
            expected = expected + 0.5 * (target * (target / q).log()).sum() / 5
    known = algorithm(batch["x"]).softmax(dim=1)[range(5), batch["y"]]
    algorithm.released = (float(known.detach().sort().values[2:4].mean()) - 1 / 3) * 1.5
    kept = -known[known <= algorithm.released * 2 / 3 + 1 / 3].log()
    assert len(kept) == 3
    torch.testing.assert_close(algorithm.training_step(batch, 0), expected + 10 * kept.mean())


def test_labels_get_no_gradient() -> None:
    algorithm = toy_uda(threshold=0.0)
    work, _ = started(algorithm, ToyData())
    batch = dict(work.batch(0))
    batch["x_weak"].requires_grad_()
    loss = algorithm.training_step(batch, 0)
    assert loss is not None
    assert loss > 0
    loss.backward()
    assert batch["x_weak"].grad is None or not batch["x_weak"].grad.any()


def test_where_every_labelled_image_is_known_the_labelled_loss_is_zero() -> None:
    algorithm = toy_uda()
    algorithm.released = 0.0
    sure = 20 * F.one_hot(torch.tensor([0, 1, 2]), 3).float()
    assert algorithm.labeled_loss(sure, torch.tensor([0, 1, 2])) == 0
    assert algorithm.labeled_loss(sure, torch.tensor([1, 2, 0])) == pytest.approx(20, abs=1e-3)
    unsure = torch.zeros(3, 3)  # chance itself is trained on
    assert algorithm.labeled_loss(unsure, torch.tensor([0, 1, 2])) == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("none", [1, 1, 1]), ("linear", [0.25, 0.5, 1]), ("exp", [0.0235, 0.0821, 1]), ("log", [0.7135, 0.9179, 0.9933])],
)
def test_threshold_of_labelled_images_over_the_rounds(shape: Any, expected: list[float]) -> None:
    algorithm, seen = toy_uda(signal_annealing=shape), []
    for round_index in (1, 2, 4):
        algorithm.current_round = toy_round(index=round_index, max_rounds=4)
        algorithm.on_round_start()
        seen.append(float(algorithm.released))
    assert seen == pytest.approx(expected, abs=1e-4)


def test_with_hard_labels_and_all_labelled_images_it_is_fixmatch(tmp_path: Path) -> None:
    """As T goes to 0 the target is one-hot, and KL against it is cross-entropy."""
    settings: dict[str, Any] = {"threshold": 0.5, "prox_mu": 0.1, "labeled_weight": 2.0}
    ours = fitted(tmp_path, toy_uda(temperature=1e-6, signal_annealing="none", **settings), mixed_clients())
    theirs = fitted(tmp_path, toy_fixmatch(**settings), mixed_clients())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)
