"""Fed-Pseudo: federated averaging with pseudo-labels of the model in training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.models import CNN
from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import mixed_clients, toy_pseudo_label, toy_shvr, uneven_clients
from tests.local_training.helpers import assert_agree, both
from tests.test_fed_shvr import Given, fitted
from tests.test_semifl import Scrambled
from tests.toy import ToyData, assert_same


def test_loss_takes_the_most_probable_class_of_each_unlabelled_image() -> None:
    algorithm, data = toy_pseudo_label(ramp_epochs=0, alpha0=0.6), uneven_clients()
    data.setup()
    algorithm.configure_model()
    algorithm.server = ServerState.of(algorithm)
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


def test_clients_of_every_kind_are_trained(tmp_path: Path) -> None:
    result = fitted(tmp_path, toy_pseudo_label(), ToyData(label_location="clients", partition=Given()))
    assert all(torch.isfinite(t).all() for t in result.values())


def test_labels_at_the_server_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"PseudoLabel trains clients on labels of their own: set data\.label_location"
    ):
        fitted(tmp_path, toy_pseudo_label(), ToyData())


# What holds for every method.


def test_true_labels_of_clients_change_no_weight(tmp_path: Path) -> None:
    data = (mixed_clients(), Scrambled(label_location="clients", num_labels=24))
    assert_same(*(fitted(tmp_path, toy_pseudo_label(ramp_epochs=0), images) for images in data))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_together_equals_one_by_one(norm: Any) -> None:
    assert_agree(*both(lambda: toy_pseudo_label(network=partial(CNN, width=4, norm=norm), ramp_epochs=0)))
