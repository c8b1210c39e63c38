"""Privacy in a deployment: nodes clip, and nobody who knows the seed can compute noise and cohorts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.updates import CentralDP, SignFlip
from tests.toy import weights

from .helpers import METHODS, FakeGrid, grid_of, server_of

KEYS: dict[str, Any] = {"max_rounds": 2, "clients_per_round": 4}


def deployed(path: Path, privacy: CentralDP, **keys: Any) -> tuple[FederatedAlgorithm, FakeGrid]:
    make, data = METHODS["FedAvg"]
    algorithm, grid = make(), grid_of(path, "FedAvg", updates=[privacy], **KEYS)
    algorithm.client_weighting = "uniform"
    server_of(path, grid, updates=[privacy], **KEYS, **keys).fit(algorithm, data())
    return algorithm, grid


def tensors(message: Any) -> dict[str, Any]:
    return {name: array.numpy() for name, array in message.content.array_records["tensors"].items()}


def test_nodes_send_clipped_updates(tmp_path: Path) -> None:
    privacy = CentralDP(delta=1e-3, noise_multiplier=0.0, clip=0.01)
    _, grid = deployed(tmp_path, privacy)
    training = [message for message in grid.sent if message.metadata.message_type.startswith("train")]
    asked = {m.metadata.dst_node_id: tensors(m) for m in training if m.metadata.dst_node_id >= 100}
    answers = [m for m in training if m.metadata.src_node_id >= 100]
    lengths = []
    for answer in answers[-4:]:
        received = asked[answer.metadata.src_node_id]
        moved = [(t - received[name]).ravel() for name, t in tensors(answer).items()]
        lengths.append(float(np.linalg.norm(np.concatenate(moved))))
    assert lengths == pytest.approx([0.01] * 4, rel=1e-3)


def test_the_noise_of_a_deployment_is_not_that_of_its_seed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"delta": 1e-3, "noise_multiplier": 1.0, "clip": 0.01}
    models = [weights(deployed(tmp_path / str(i), CentralDP(**given))[0]) for i in range(2)]
    assert all(not torch.equal(models[1][name], t) for name, t in models[0].items() if t.is_floating_point())


def test_a_deployment_refuses_simulated_attackers_and_a_minimum_of_answers(tmp_path: Path) -> None:
    make, data = METHODS["FedAvg"]
    with pytest.raises(ValueError, match="SignFlip simulates"):
        server_of(tmp_path, grid_of(tmp_path, "FedAvg"), updates=[SignFlip()]).fit(make(), data())
    with pytest.raises(ValueError, match="min-clients is 2"):
        deployed(tmp_path, CentralDP(delta=1e-3, noise_multiplier=1.0), min_clients=2)
