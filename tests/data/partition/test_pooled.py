"""Pooled images of a federation."""

from __future__ import annotations

import pytest
import torch

from lightning_fedssl.data.partition.base import Dirichlet, Iid, Partition, Shards
from lightning_fedssl.data.partition.pooled import Pooled
from tests.data.partition.helpers import CIFAR_LABELS, draw


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("of", [Iid(), Shards(), Dirichlet(0.1)])
def test_pooled_images_are_those_of_the_federation_with_the_same_labels(of: Partition, seed: int) -> None:
    federation = draw(of, CIFAR_LABELS[:1003], num_clients=20, num_labels=50, seed=seed)
    pooled = draw(Pooled(20, of), CIFAR_LABELS[:1003], num_clients=1, num_labels=50, location="clients", seed=seed)
    assert torch.equal(pooled.clients[0].labeled, federation.server_labeled)
    apart = torch.cat([client.unlabeled for client in federation.clients])
    assert set(pooled.clients[0].unlabeled.tolist()) == set(apart.tolist())
    assert len(pooled.clients) == 1
    assert len(pooled.server_labeled) == 0


def test_pooled_refuses_a_federation() -> None:
    for clients, location in ((2, "clients"), (1, "server")):
        with pytest.raises(ValueError, match=r"needs data\.num_clients: 1 and data\.label_location: clients"):
            draw(Pooled(20), CIFAR_LABELS, num_clients=clients, location=location)  # type: ignore[arg-type]
