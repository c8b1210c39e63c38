"""Fed-Pseudo: federated averaging with pseudo-labels of the model in training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import fitted, toy_pseudo_label, toy_shvr, uneven_clients


def test_loss_takes_the_most_probable_class_of_each_unlabelled_image() -> None:
    algorithm, data = toy_pseudo_label(ramp_epochs=0, alpha0=0.6), uneven_clients()
    data.setup()
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm)
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(0)
    x, u = algorithm(batch["x"]), algorithm(batch["u"])
    expected = F.cross_entropy(x, batch["y"]) + 0.6 * F.cross_entropy(u, u.argmax(dim=1))
    torch.testing.assert_close(algorithm.training_step(batch, 0), expected)
    assert F.cross_entropy(u, u.argmax(dim=1)) > 0


def test_without_weight_it_is_federated_averaging_on_the_same_labelled_batches(tmp_path: Path) -> None:
    pseudo = fitted(tmp_path, toy_pseudo_label(alpha0=0.0), uneven_clients())
    plain = {"alpha0": 0.0, "alpha2": 0.0, "control_variate": False, "averaging": "plain"}
    for name, value in fitted(tmp_path, toy_shvr(**plain), uneven_clients()).items():
        torch.testing.assert_close(pseudo[name], value, rtol=0, atol=1e-10)
    weighted = fitted(tmp_path, toy_pseudo_label(), uneven_clients())
    assert not torch.allclose(weighted["network.classifier.bias"], pseudo["network.classifier.bias"])


# What holds for every method.
