"""Data of one's own for tests: two classes whose means differ, as tensors, a data set and a Lightning data module."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fedssl.data import Datasets, FederatedDataModule, GaussianNoise


def samples(shape: tuple[int, ...], count: int = 60, seed: int = 0) -> TensorDataset:
    labels = torch.arange(count) % 2
    noise = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(noise + labels.view(-1, *[1] * len(shape)), labels)


def without_labels(count: int = 30) -> TensorDataset:
    return TensorDataset(samples((5,), count, seed=2).tensors[0])


def federation(shape: tuple[int, ...] = (5,), **settings: Any) -> FederatedDataModule:
    defaults: dict[str, Any] = {"weak": "none", "strong": GaussianNoise(0.5), "num_labels": 8, "num_clients": 3}
    return FederatedDataModule.from_datasets(samples(shape), samples(shape, 20, 1), **defaults | settings)


def own(train: Any, test: Any = None, **options: Any) -> Datasets:
    """A source of data sets or arrays; the training samples are the test samples if none are given."""
    return Datasets(train, train if test is None else test, **options)


def set_up(source: Any, **settings: Any) -> FederatedDataModule:
    """A source as a federation of two clients."""
    defaults: dict[str, Any] = {"weak": "none", "strong": "none", "num_clients": 2, "num_labels": 4}
    data = FederatedDataModule(source, **defaults | settings)
    data.setup()
    return data


class Rows(Dataset[Any]):
    """A class that a configuration can name."""

    def __init__(self, count: int = 60, seed: int = 0, labeled: bool = True, clients: int = 0) -> None:
        self.samples, self.labels = samples((5,), count, seed).tensors
        self.labeled = labeled
        if clients:
            self.client_ids = [f"clinic {row % clients}" for row in range(count)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        return (self.samples[row].numpy(), int(self.labels[row])) if self.labeled else self.samples[row]


class Pairs(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.sets = samples((5,)), samples((5,), 20, 1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.sets[0], batch_size=7, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.sets[1], batch_size=7)
