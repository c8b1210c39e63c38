"""What every source must return, clients' identifiers, and CSV files."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedssl.data import DataSource, Iid, LoadedData, NaturalClients
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.sources.base import number_clients, read_csv
from lightning_fedssl.data.sources.reading import Reading
from tests.data.helpers import federation, samples, set_up


class Mistaken(DataSource):
    """A source of a user's own with one mistake."""

    def __init__(self, mistake: str | float) -> None:
        self.mistake = mistake

    def load(self) -> LoadedData:
        x, labels = samples((2,)).tensors
        x = x.to(torch.float16) if self.mistake == "type" else x
        if self.mistake == "nan":
            x[3, 1] = math.nan
        names = ("a",) if self.mistake == "names" else ("a", "b")
        classes, shape = 1 if self.mistake == "one class" else 2, (2, 5) if self.mistake == "shape" else (2,)
        spec = DatasetSpec(
            "mine", classes, shape, (0.0,) if self.mistake == "mean" else (0.0, 0.0),
            (1.0, 0.0 if self.mistake == "std" else 1.0), names, pixels=False, usual_views=False,
        )  # fmt: skip
        if isinstance(self.mistake, float):
            labels = labels.where(torch.arange(60) != 3, self.mistake)
        clients = torch.arange(50) if self.mistake == "clients" else None
        files = tuple("ab") if self.mistake == "files" else ()
        test = ImageSplit(*samples((2,)).tensors)  # type: ignore[arg-type]
        train = ImageSplit(x, labels[:50] if self.mistake == "labels" else labels, clients, files)
        whole: Any = (spec, train, train) if self.mistake == "tuple" else LoadedData(spec, train, test)
        return None if self.mistake == "none" else whole  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("labels", "train: 60 samples and 50 labels; give one for each"),
        ("clients", "train: 60 samples and 50 client_ids; give one for each"),
        ("files", "train: 60 samples and 2 files; give one for each"),
        ("nan", r"train: 1 of 60 samples hold NaN or infinite values \(the first is sample 3\)"),
        ("one class", r"there is one class \(a, b\) or none; two are needed"),
        ("names", "2 classes, 1 class_names, .*; name all classes"),
        ("mean", "1 means and 2 stds"),
        ("std", "must be finite, and std above 0"),
        ("shape", r"60 samples are \(2,\) torch.float32, and DatasetSpec says \(2, 5\)"),
        ("type", r"60 samples are \(2,\) torch.float16"),
        ("none", ".load must return LoadedData"),
        ("tuple", ".load must return LoadedData"),
        (2.0, "2.0 is not a label; give one class number from 0 to 1"),
        (-2.0, "-2.0 is not a label"),
        (0.5, "0.5 is not a label"),
        (math.nan, "nan is not a label"),
    ],
)
def test_a_mistake_in_a_source_of_a_user_s_own_is_named(mistake: str | float, message: str) -> None:
    with pytest.raises(ValueError, match=f"data.dataset: Mistaken.*{message}"):
        set_up(Mistaken(mistake))


def test_labels_of_a_source_may_be_whole_numbers_of_any_type_or_left_out() -> None:
    data = set_up(Mistaken(-1.0))
    assert data.true_labels(torch.tensor([2, 3, 4])).tolist() == [0, -1, 0]
    assert data.statistics.unknown_counts is not None


@pytest.mark.parametrize("location", ["server", "clients"])
def test_natural_clients_hold_their_own_samples_and_test_samples(location: Any) -> None:
    ids = [f"site {k % 4}" for k in range(60)]
    tested = ["site 3", "elsewhere"] * 10
    data = federation(client_ids=ids, test_client_ids=tested, num_clients=4, label_location=location)
    data.setup()
    assert data.num_clients == 4
    for client in range(4):
        local = data.local_data(client, 1)
        held = torch.cat([local.labeled, local.unlabeled]).tolist()
        assert held
        assert {ids[i] for i in held} == {f"site {client}"}
    assert data.client_test_indices(3).tolist() == list(range(0, 20, 2))  # type: ignore[union-attr]
    assert data.client_test_indices(0).tolist() == []  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"data\.num_clients: 5, but data.dataset names 4; set 4"):
        federation(client_ids=ids, num_clients=5).setup()


def test_clients_of_the_data_are_mixed_without_a_warning_only_if_asked() -> None:
    source = federation(client_ids=["a", "b", "c"] * 20).source
    with pytest.warns(UserWarning, match=r"data\.partition is left out: Iid mixes the samples of the clients"):
        set_up(source, num_clients=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in (Iid(), NaturalClients()):
            set_up(source, num_clients=3, partition=rule)


def test_clients_of_test_samples_alone_are_named() -> None:
    with pytest.warns(UserWarning, match=r"no training sample has the client 'elsewhere' \(1 in all\)"):
        federation(client_ids=["here"] * 60, test_client_ids=["here", "elsewhere"] * 10)


def test_numbers_of_other_types_and_test_samples_without_a_client_are_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own, tested, names = number_clients([np.int64(5), 3], [5.0, None, torch.tensor(3)])
    assert own is not None
    assert tested is not None
    assert (own.tolist(), tested.tolist(), names) == ([1, 0], [1, -1, 0], ("3", "5"))


def test_a_csv_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.root: the file '.*no.csv' does not exist"):
        read_csv(tmp_path / "no.csv", [], Reading("data.root"))
