"""RSCFed: kept teachers, distance-reweighted averages, and the consensus of several draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.state import ClientUpdate, ServerState
from tests.algorithms.helpers import fitted, fully_labeled, mixed_clients, toy_rscfed
from tests.toy import labeled_clients, toy_fedavg, toy_round


def update(client: int, value: float, images: int, labeled: bool = False) -> ClientUpdate:
    payload = {"is_labeled": torch.ones(())} if labeled else {}
    return ClientUpdate(client, {"w": torch.tensor([value])}, {"b": torch.tensor([0.0])}, images, 1, payload)


def test_weights_by_hand() -> None:
    """Two unlabelled clients and one labelled, of factor 3 in both averages; the mean is (10 + 2 * 30 * 3) / 120."""
    algorithm = toy_rscfed(labeled_factor=3, distance_scale=7, labeled_distance_scale=2)
    drawn = [update(0, 1.0, 10), update(1, 0.0, 20), update(2, 2.0, 30, labeled=True)]
    mean = (10 * 1 + 90 * 2) / 120
    raw = [10 * math.exp(-2 * (mean - 1) / 10), 20 * math.exp(-2 * mean / 20), 270 * math.exp(-2 * (2 - mean) / 30)]
    models = [{**u.parameters, **u.buffers} for u in drawn]
    assert algorithm.consensus_weights(drawn, models) == pytest.approx([r / sum(raw) for r in raw], rel=1e-6)
    mean = 1 / 3
    raw = [10 * math.exp(-7 * (1 - mean) / 10), 20 * math.exp(-7 * mean / 20)]
    found = algorithm.consensus_weights(drawn[:2], models[:2])
    assert found == pytest.approx([r / sum(raw) for r in raw], rel=1e-6)


def test_the_global_model_is_the_mean_of_the_draws_that_had_an_update() -> None:
    algorithm = toy_rscfed(sub_consensus=3)
    algorithm.configure_model()
    algorithm.server = ServerState({"w": torch.zeros(1)}, {"b": torch.zeros(1)})
    for number, values in enumerate(([1.0], [], [4.0]), start=1):
        algorithm.current_round = toy_round(index=number)
        algorithm.aggregate(algorithm.accumulate(update(0, value, 5) for value in values))
        assert algorithm.server.parameters["w"].item() == (2.5 if number == 3 else 0)
    algorithm.current_round = toy_round(index=6)
    algorithm.aggregate({"model": WeightedSum()})
    assert algorithm.server.parameters["w"].item() == 2.5


def test_the_teacher_follows_with_a_growing_decay_and_is_kept() -> None:
    """After steps 1 and 2 the teacher is w_1, and (w_1 + w_2) / 2; the target is its squared, rescaled prediction."""
    algorithm: Any = toy_rscfed(unlabeled_weight=3)
    data = fully_labeled()
    data.setup()
    algorithm.configure_model()
    algorithm.server, algorithm.current_round = ServerState.from_module(algorithm, algorithm.local_modules), toy_round()
    work = algorithm.on_client_start(data.local_data(3, 1))
    batch, weight = work.batch(0), algorithm.network.classifier.weight
    teacher = algorithm.teacher["network"].classifier.weight
    p = algorithm(batch["x_teacher"]).softmax(dim=1).square()
    target = (p / p.sum(dim=1, keepdim=True)).detach()
    expected = 3 * (algorithm(batch["x_student"]).softmax(dim=1) - target).square().sum() / 5
    torch.testing.assert_close(algorithm.training_step(batch, 0), expected)
    values = [weight.detach().clone()]
    for step in (1, 2):
        weight.data += step
        values.append(weight.detach().clone())
        algorithm.training_step(batch, step)
    torch.testing.assert_close(teacher, (values[1] + values[2]) / 2)
    algorithm.on_client_end(ClientUpdate(3, {}, {}, 1, 3))
    kept = algorithm.clients.get(3, "teacher")
    assert kept["steps"] == 3
    torch.testing.assert_close(kept["network.classifier.weight"], (values[1] + 2 * values[2]) / 3)


def test_with_labels_everywhere_and_without_distances_it_is_federated_averaging(tmp_path: Path) -> None:
    plain = {"sub_consensus": 1, "distance_scale": 0, "labeled_distance_scale": 0, "gradient_clip_norm": None}
    own = fitted(tmp_path, toy_rscfed(keep_client_optimizer=False, **plain), labeled_clients())
    for name, value in fitted(tmp_path, toy_fedavg(), labeled_clients()).items():
        torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11)


def test_a_client_with_both_kinds_of_images_is_refused() -> None:
    data = mixed_clients()
    data.setup("fit")
    with pytest.raises(ValueError, match=r"data\.partition"):
        toy_rscfed().check_data(data)
