"""FedDB: labels and aggregation weights without the class prior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms.feddb import unbiased_weights
from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import fitted, mixed_clients, toy_feddb
from tests.toy import toy_fedavg


def test_labels_by_hand_and_the_prior_follows_the_weak_views() -> None:
    algorithm, data = toy_feddb(), mixed_clients()
    data.setup()
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm, algorithm.local_modules)
    local = data.local_data(1, 1)
    images = torch.cat([local.labeled, local.unlabeled])
    p = algorithm(local.weak(images, "labeling")).softmax(dim=1)
    debiased = p / p.mean(dim=0)
    debiased = debiased / debiased.sum(dim=1, keepdim=True)
    algorithm.threshold = float(debiased.max(dim=1).values.median())
    pseudo = algorithm.label_images(local, images)
    assert torch.equal(pseudo.labels, debiased.argmax(dim=1))
    assert not torch.equal(pseudo.labels, p.argmax(dim=1))
    torch.testing.assert_close(pseudo.confidence, debiased.max(dim=1).values)
    work = algorithm.on_client_start(local)
    assert work.num_steps == 2
    batch = work.batch(1)
    assert len(batch["y"]) == len(local.labeled)
    assert len(batch["y_fix"]) == int(pseudo.mask.sum())
    algorithm.training_step(batch, 1)
    expected = (p.mean(dim=0) + algorithm(batch["x_weak"]).softmax(dim=1).mean(dim=0)) / 2
    torch.testing.assert_close(algorithm.prior.p_s, expected)


def test_weights_lower_the_share_of_a_frequent_class() -> None:
    """Two clients that prefer one class and one that prefers the other; by hand for one step."""
    priors = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    mixture = priors.mean(dim=0)
    gradient = priors @ (mixture - 0.5)
    expected = torch.softmax(1 / 3 - 1.9 * (gradient + 0.3), dim=0)
    torch.testing.assert_close(unbiased_weights(priors, steps=1), expected)
    weights = unbiased_weights(priors)
    assert weights[2] > weights[0] == weights[1]
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights @ priors)[0] < mixture[0]


def test_without_debiasing_and_confident_images_it_is_federated_averaging(tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "debias_labels": False,
        "debias_weights": False,
        "threshold": 1,
        "aggregation_optimizer": None,
    }
    plain |= {"gradient_clip_norm": None, "keep_client_optimizer": False}
    own = fitted(tmp_path, toy_feddb(**plain), mixed_clients())
    fedavg = toy_fedavg(client_epochs=2, client_weighting="uniform")
    for name, value in fitted(tmp_path, fedavg, mixed_clients()).items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=0)
    weighted = fitted(tmp_path, toy_feddb(**plain | {"debias_weights": True}), mixed_clients())
    assert not torch.allclose(weighted["network.classifier.weight"], own["network.classifier.weight"], atol=1e-9)
