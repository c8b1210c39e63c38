"""Partitions drawn, and splits written down, for tests."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest

CIFAR_LABELS = torch.arange(50000) % 10
NumLabels = int | Literal["all"]
Location = Literal["server", "clients"]


def draw(
    partition: Partition,
    labels: Tensor,
    num_clients: int = 10,
    num_labels: NumLabels = 40,
    location: Location = "server",
    seed: int = 0,
    num_classes: int = 10,
) -> FederatedSplit:
    generator = sampling.rng(seed, "partition")
    asked = SplitRequest(labels, num_classes, num_clients, num_labels, location, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        split = partition.split(asked, generator)
    partition.check(split, asked)
    return split


def drawn_with_unlabeled(partition: Partition, asked: SplitRequest) -> FederatedSplit:
    split = partition.split(asked, sampling.rng(0, "partition"))
    split = partition.add_unlabeled(split, asked, sampling.rng(0, "unlabeled"))
    partition.check(split, asked)
    return split


def held(client: ClientIndices) -> Tensor:
    return torch.cat([client.labeled, client.unlabeled])


def all_labeled(split: FederatedSplit) -> Tensor:
    return torch.cat([split.server_labeled, *(client.labeled for client in split.clients)])


def sizes(split: FederatedSplit) -> list[int]:
    return [len(held(client)) for client in split.clients]


def hand_split(*clients: list[int], server: list[int] | None = None) -> FederatedSplit:
    empty = torch.zeros(0, dtype=torch.int64)
    parts = [ClientIndices(empty, torch.tensor(client, dtype=torch.int64)) for client in clients]
    return FederatedSplit(3, torch.tensor(server or [], dtype=torch.int64), parts)
