"""The data sets of a Lightning data module."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.data import FromLightning
from lightning_fedssl.models import MLP
from tests.data.helpers import Pairs, Rows, samples, set_up
from tests.toy import toy_trainer


def test_a_lightning_data_module_is_adapted_and_a_bare_one_is_refused(tmp_path: Path) -> None:
    data = set_up(Pairs(), num_clients=3, label_location="clients")
    toy_trainer(tmp_path, max_rounds=1).fit(FedAvg(network=partial(MLP, hidden=(4,))), data)
    assert data.in_shape == (5,)
    with pytest.raises(TypeError, match=r"FederatedDataModule\(datamodule, weak=\.\.\.,"):
        toy_trainer(tmp_path).fit(FedAvg(network=MLP), Pairs())  # type: ignore[arg-type]


class Loaders(LightningDataModule):
    """A data module with given loaders."""

    def __init__(self, train: Any, test: Any, val: Any = None) -> None:
        super().__init__()
        self.train, self.test, self.val = train, test, val

    def train_dataloader(self) -> Any:
        return self.train

    def test_dataloader(self) -> Any:
        return self.test

    def val_dataloader(self) -> Any:
        return self.val


ROWS = samples((5,))
EVERY_SAMPLE: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "one by one": {"batch_size": None},
    "batches": {"batch_sampler": BatchSampler(RandomSampler(ROWS), 7, False)},
    "ranks": {"sampler": DistributedSampler(ROWS, num_replicas=2, rank=0)},
}


def test_a_loader_gives_the_samples_that_its_sampler_draws() -> None:
    """One data set with a sampler for each part: the validation samples are not trained on."""
    rows = Rows(60, clients=6)
    rows.classes = ["a", "b"]  # type: ignore[attr-defined]
    val = BatchSampler(SubsetRandomSampler(range(50, 60)), 3, drop_last=False)
    module = Loaders(
        DataLoader(rows, sampler=SubsetRandomSampler([*range(20, 50)][::-1])),
        DataLoader(rows, sampler=SubsetRandomSampler(torch.arange(20).flip(0))),  # type: ignore[arg-type]
        DataLoader(rows, batch_sampler=val),
    )
    loaded, whole = FromLightning(module).load(), rows.samples
    assert loaded.validation is not None
    for split, part in ((loaded.train, whole[20:50]), (loaded.test, whole[:20]), (loaded.validation, whole[50:])):
        assert torch.equal(split.images, part)
    assert loaded.spec.class_names == ("a", "b")
    assert loaded.train.client_ids is not None
    assert loaded.train.client_ids.tolist() == [i % 6 for i in range(20, 50)]


@pytest.mark.parametrize("settings", EVERY_SAMPLE.values(), ids=EVERY_SAMPLE)
def test_a_loader_that_draws_every_sample_gives_the_data_set(settings: dict[str, Any]) -> None:
    loaders = Loaders(DataLoader(ROWS, **settings), DataLoader(ROWS))
    state = torch.get_rng_state()
    assert torch.equal(FromLightning(loaders).load().train.images, ROWS.tensors[0])
    assert torch.equal(torch.get_rng_state(), state)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 60, 60)), "draws samples repeatedly"),
        (DataLoader(Stream()), "must give one DataLoader of a map-style data set"),
        (None, "must give one DataLoader"),
        ([], "must give one DataLoader"),
    ],
)
def test_a_loader_whose_samples_are_not_known_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.dataset: Loaders\.test_dataloader {message}"):
        FromLightning(Loaders(DataLoader(ROWS), loader))
    assert FromLightning(Loaders(DataLoader(ROWS), DataLoader(ROWS), [])).load().validation is None
