"""Every way in for data of one's own: unlabelled and validation samples, configurations, arrays, Hugging Face."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_convert,
)

from lightning_fedssl.algorithms import FixMatch, SemiFL
from lightning_fedssl.callbacks import PseudoLabelQuality
from lightning_fedssl.cli.lightning_cli import FederatedCLI
from lightning_fedssl.data import (
    Arrays,
    BreastCancer,
    Columns,
    Datasets,
    FederatedDataModule,
    FromFile,
    FromLightning,
    FullyLabeledClients,
    GaussianNoise,
    HuggingFace,
    PerSample,
    equal_samples,
    federated_data,
)
from lightning_fedssl.data.datasets import ImageSplit
from lightning_fedssl.data.image_files import read_image
from lightning_fedssl.export import export, network_of
from lightning_fedssl.models import MLP
from tests.test_sources import Pairs, federation, samples
from tests.toy import assert_same, toy_trainer, weights


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def semifl(**settings: Any) -> SemiFL:
    defaults: dict[str, Any] = {"threshold": 0.5, "server_epochs": 1}
    return SemiFL(network=partial(MLP, hidden=(8,)), **defaults | settings)


def without_labels(count: int = 30) -> TensorDataset:
    return TensorDataset(samples((5,), count, seed=2).tensors[0])


class Rows(Dataset[Any]):
    """Two classes whose means differ, as a class that a configuration can name."""

    def __init__(self, count: int = 60, seed: int = 0, labeled: bool = True, clients: int = 0) -> None:
        self.samples, self.labels = samples((5,), count, seed).tensors
        self.labeled = labeled
        if clients:
            self.client_ids = [f"clinic {row % clients}" for row in range(count)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        return (self.samples[row].numpy(), int(self.labels[row])) if self.labeled else self.samples[row]


@pytest.mark.parametrize("shape", [(5,), (2, 16)], ids=str)
def test_the_exported_network_takes_the_numbers_of_the_data_set(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data, algorithm = federation(shape), semifl()
    toy_trainer(tmp_path, max_rounds=1).fit(algorithm, data)
    (last,) = tmp_path.rglob("last.ckpt")
    network, description = network_of(last)
    assert (description["input"], description["resize"]) == ("numbers", None)
    assert description["network"]["in_shape"] == list(shape)
    export(network, description, tmp_path, "hub")
    assert "in the units of the data set" in (tmp_path / "README.md").read_text()
    given = samples(shape, 7, 9).tensors[0]
    exported = torch.export.load(tmp_path / "model.pt2").module()
    expected = network.eval()(data.views.plain(given, torch.zeros(0)))
    torch.testing.assert_close(exported(given), expected)


# Samples without labels


def test_samples_without_labels_go_to_the_clients_only() -> None:
    plain, data = federation(), federation(unlabeled=without_labels())
    plain.setup()
    data.setup()
    extra = set(range(60, 90))
    assert torch.equal(data.split.server_labeled, plain.split.server_labeled)
    for client in range(3):
        before, now = (d.local_data(client, 1).unlabeled.tolist() for d in (plain, data))
        assert set(now) - set(before) <= extra
        assert len(now) == len(before) + 10
    assert extra <= set(data.unlabeled_pool().tolist()) <= set(data.images_outside_the_server().tolist())
    assert data.statistics.sizes.tolist() == (plain.statistics.sizes + 10).tolist()
    assert data.statistics.class_counts.tolist() == plain.statistics.class_counts.tolist()
    assert not extra & set(data._validation.tolist())


def test_the_server_can_have_all_labels_and_the_clients_the_samples_without(tmp_path: Path) -> None:
    data = federation(unlabeled=without_labels(), num_labels="all", validation=0)
    data.setup()
    assert data.split.server_labeled.tolist() == list(range(60))
    assert data.unlabeled_pool().tolist() == list(range(60, 90))
    toy_trainer(tmp_path, max_rounds=2).fit(semifl(), data)


def test_labels_of_samples_without_labels_are_never_read() -> None:
    class Forbidden:
        def __int__(self) -> int:
            raise AssertionError("a label was read")

        __float__ = __int__

    pairs = [(x, Forbidden()) for x in without_labels().tensors[0]]
    finals = [federation(unlabeled=given) for given in (pairs, without_labels(), (without_labels().tensors[0],))]
    for data in finals:
        data.setup()
        assert data.true_labels(torch.arange(60, 90)).tolist() == [-1] * 30
        assert torch.equal(data.local_data(0, 1).images, finals[0].local_data(0, 1).images)


def test_samples_without_labels_follow_their_identifiers_and_the_file_of_a_partition(tmp_path: Path) -> None:
    ids: dict[str, Any] = {"client_ids": ["a", "b", "c"] * 20, "unlabeled_client_ids": ["c", "d"] * 15}
    data = federation(unlabeled=without_labels(), **ids, num_clients=4)
    data.setup()
    assert data.local_data(3, 1).unlabeled.tolist() == list(range(61, 90, 2))
    data.split.save(tmp_path / "partition.json")
    again = federation(
        unlabeled=without_labels(), **ids, num_clients=4, partition=FromFile(str(tmp_path / "partition.json"))
    )
    again.setup()
    assert again.split.hash == data.split.hash
    with pytest.raises(ValueError, match="client_ids with unlabeled samples need unlabeled_client_ids as well"):
        federation(unlabeled=without_labels(), client_ids=ids["client_ids"])


def test_clients_with_labels_get_no_samples_without() -> None:
    settings: dict[str, Any] = {"label_location": "clients", "num_labels": "all", "num_clients": 5}
    data = federation(unlabeled=without_labels(), partition=FullyLabeledClients(2), **settings)
    data.setup()
    counts = [(len(client.labeled) > 0, len(client.unlabeled)) for client in data.split.clients]
    assert counts[:2] == [(True, 0)] * 2
    assert data.statistics.unknown_counts is not None
    assert data.statistics.unknown_counts.tolist() == [0, 0, 10, 10, 10]


def test_pseudo_labels_of_unknown_classes_count_in_the_mask_rate_only(tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    class Watch(PseudoLabelQuality):  # type: ignore[misc]
        def on_pseudo_labels(self, trainer: Any, algorithm: Any, indices: Tensor, pseudo: Any) -> None:
            truth = trainer.datamodule.true_labels(indices)
            known = truth >= 0
            right = (pseudo.labels == truth)[known]
            seen["right"] = seen.get("right", 0) + int(right.sum())
            seen["known"] = seen.get("known", 0) + len(right)
            super().on_pseudo_labels(trainer, algorithm, indices, pseudo)

    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[Watch()])
    trainer.fit(semifl(), federation(unlabeled=without_labels(), num_clients=3))
    assert seen["known"] < 60
    assert float(trainer.callback_metrics["pseudo_label/accuracy"]) == pytest.approx(seen["right"] / seen["known"])


# Validation samples


def test_validation_samples_take_the_place_of_the_fraction(tmp_path: Path) -> None:
    own = samples((5,), 14, seed=7)
    data = federation(validation=own)
    data.setup()
    values = torch.cat([values for values, _ in data.evaluation_batches("validate")])
    mean, std = (torch.tensor(v, dtype=torch.float32) for v in (data.spec.mean, data.spec.std))
    torch.testing.assert_close(values, (own.tensors[0] - mean) / std)
    assert len(data._validation) == 0
    assert len(data.unlabeled_pool()) == 51  # 60, 8 at the server, and a remainder of 1 that Iid leaves out
    assert [len(v) for v, _ in federation_batches(validation="test")] == [20]
    assert [len(v) for v, _ in federation_batches(validation=0.1)] == [6]
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(semifl(), federation(validation=own))
    assert "val/accuracy" in trainer.callback_metrics


def federation_batches(**settings: Any) -> list[tuple[Tensor, Tensor]]:
    data = federation(**settings)
    data.setup()
    return list(data.evaluation_batches("validate"))


# From a configuration and the command line

RUN = {
    "model": "SemiFL",
    "model.network": "MLP",
    "model.optimizer": "SGD",
    "model.optimizer.lr": "0.1",
    "data.weak": "none",
    "data.strong": "GaussianNoise",
    "data.num_clients": "3",
    "data.num_labels": "8",
}


def from_command_line(**options: str) -> FederatedDataModule:
    arguments = [part for key, value in (RUN | options).items() for part in (f"--{key}", value)]
    return FederatedCLI(arguments, run=False, exit_on_error=False).datamodule  # type: ignore[no-any-return]


def test_data_sets_are_named_by_class_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    rows, own = "tests.test_own_data.Rows", "data.dataset.init_args"
    typed = {
        "data.dataset": "Datasets", f"{own}.train": rows, f"{own}.train.init_args.count": "40",
        f"{own}.test": rows, f"{own}.test.init_args.seed": "1",
        f"{own}.unlabeled": rows, f"{own}.unlabeled.init_args.labeled": "false",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(
        f"data:\n  dataset:\n    class_path: Datasets\n    init_args:\n"
        f"      train: {{class_path: {rows}, init_args: {{count: 40}}}}\n"
        f"      test: {{class_path: {rows}, init_args: {{seed: 1}}}}\n"
        f"      unlabeled: {{class_path: {rows}, init_args: {{labeled: false}}}}\n"
    )
    for data in (from_command_line(**typed), from_command_line(config=str(tmp_path / "run.yaml"))):
        data.setup()
        assert len(data.statistics.sizes) == 3
        assert data.statistics.unknown_counts is not None
        assert data.statistics.unknown_counts.tolist() == [20, 20, 20]


def test_a_data_set_names_its_clients(tmp_path: Path) -> None:
    data = FederatedDataModule.from_datasets(Rows(clients=4), Rows(20, 1, clients=2), weak="none", strong="none")
    assert data.num_clients == 4
    data.num_labels = 8
    data.setup()
    assert data.client_test_indices(1).tolist() == list(range(1, 20, 2))  # type: ignore[union-attr]


def test_a_lightning_data_module_is_named_by_its_class() -> None:
    data = from_command_line(**{"data.dataset": "tests.test_sources.Pairs"})
    data.setup()
    assert data.in_shape == (5,)
    with pytest.raises(TypeError, match=r"data\.dataset is a FederatedDataModule already"):
        FederatedDataModule(federation())


class WithValidation(Pairs):
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples((5,), 12, 3))


class NoTest(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples((5,)))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Streams(NoTest):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream())

    test_dataloader = train_dataloader


def test_the_loaders_of_a_lightning_data_module_are_read_or_refused() -> None:
    data = FederatedDataModule(WithValidation(), weak="none", strong="none", num_clients=3, num_labels=8)
    data.setup()
    assert sum(len(labels) for _, labels in data.evaluation_batches("validate")) == 12
    with pytest.raises(ValueError, match=r"data\.dataset: NoTest\.test_dataloader is missing"):
        FederatedDataModule(NoTest(), weak="none", strong="none")
    with pytest.raises(ValueError, match=r"Streams\.train_dataloader must give one DataLoader of a map-style data set"):
        FederatedDataModule(Streams(), weak="none", strong="none")


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
OTHER_SAMPLES: dict[str, dict[str, Any]] = {
    "WeightedRandomSampler": {"sampler": WeightedRandomSampler([1.0] * 60, 60)},
    "RandomSampler": {"sampler": RandomSampler(ROWS, replacement=True)},
    "SequentialSampler": {"sampler": SequentialSampler(range(50))},
    "DistributedSampler": {"sampler": DistributedSampler(range(50), num_replicas=2, rank=0)},  # type: ignore[arg-type]
    "Backwards": {"sampler": type("Backwards", (SubsetRandomSampler,), {})([2, 1, 0])},
    "Batches": {"batch_sampler": type("Batches", (BatchSampler,), {})(SubsetRandomSampler([1]), 1, False)},
    "list": {"batch_sampler": [[0, 1], [2, 3]]},
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = FromLightning(
            Loaders(DataLoader(ROWS, **settings), DataLoader(ROWS, collate_fn=default_convert))
        ).load()
    assert torch.equal(loaded.train.images, ROWS.tensors[0])


@pytest.mark.parametrize(("name", "settings"), OTHER_SAMPLES.items(), ids=OTHER_SAMPLES)
def test_a_loader_whose_samples_are_not_known_is_refused(name: str, settings: dict[str, Any]) -> None:
    module = Loaders(DataLoader(ROWS), DataLoader(ROWS), DataLoader(ROWS, **settings))
    message = rf"data\.dataset: Loaders\.val_dataloader has a {name} that may not .* as torch\.utils\.data\.Subset"
    with pytest.raises(ValueError, match=message):
        FromLightning(module).load()


def test_a_collate_fn_that_is_not_used_is_named() -> None:
    own = DataLoader(ROWS, collate_fn=list)
    with pytest.warns(UserWarning, match="Loaders: the collate_fn of train_dataloader, val_dataloader is not used"):
        FromLightning(Loaders(own, DataLoader(ROWS), own)).load()


@pytest.mark.parametrize("nothing", [None, []])
def test_a_function_that_gives_no_loader_means_no_data(nothing: Any) -> None:
    loader = DataLoader(ROWS)
    assert FromLightning(Loaders(loader, loader, nothing)).load().validation is None
    with pytest.raises(ValueError, match=r"data\.dataset: Loaders\.test_dataloader is missing or gives no loader"):
        FromLightning(Loaders(loader, nothing)).load()


# Arrays


def test_arrays_of_a_file_are_read(tmp_path: Path) -> None:
    train, test = samples((2, 16)), samples((2, 16), 20, 1)
    arrays: dict[str, Any] = {"train": train.tensors[0], "train_labels": train.tensors[1], "test": test.tensors[0]}
    path = str(tmp_path / "signals.npz")
    ids: dict[str, Any] = {"client_ids": ["a", "b"] * 30, "unlabeled_client_ids": ["b"] * 4}
    ids["unlabeled"] = train.tensors[0][:4]
    np.savez(path, **arrays, test_labels=test.tensors[1], **ids, validation=test.tensors[0],
             validation_labels=test.tensors[1])  # fmt: skip
    loaded = Arrays(path).load()
    assert torch.equal(loaded.train.images[:60], train.tensors[0])
    assert loaded.train.labels[60:].tolist() == [-1] * 4
    assert loaded.train.client_ids is not None
    assert loaded.train.client_ids[58:].tolist() == [0, 1, 1, 1, 1, 1]
    assert loaded.validation is not None
    data = from_command_line(**{"data.dataset": "Arrays", "data.dataset.path": path, "data.num_clients": "2"})
    assert data.in_shape == (2, 16)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"signals\.npz' lacks test_labels; Arrays reads train, train_labels, test"):
        Arrays(path).load()
    Path(path).write_text("no arrays")
    with pytest.raises(ValueError, match=r"is no readable file of numpy\.savez with arrays of numbers"):
        Arrays(path).load()
    with pytest.raises(FileNotFoundError, match=r"the file 'nowhere\.npz' does not exist"):
        Arrays("nowhere.npz").load()


# What a data set gives


class Given(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        item = self.items[row]
        return item() if callable(item) else item


X = torch.zeros(3)
BAD_ITEMS: list[tuple[Given, str]] = [
    (Given((X, "cat")), r"the label of train\[0\] is 'cat'; give the number of a class, from 0"),
    (Given((X, 0.5)), "train labels must be one class number from 0 for each sample"),
    (Given({"x": X, "y": 0}), r"train\[0\] must be \(sample, label\), got a dict with x, y; wrap the data set in Col"),
    (Given((X, 0), (X[:2], 1)), r"sample 0 is \(3,\) torch.float32, sample 1 \(2,\)"),
    (Given(lambda: (torch.rand(3), 0)), r"train\[0\] differs between two readings; remove random transforms"),
    (Given(), "train has no sample"),
]


@pytest.mark.parametrize(("given", "message"), BAD_ITEMS)
def test_items_that_cannot_be_used_are_named(given: Given, message: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.dataset: .*{message}"):
        Datasets(given, samples((3,))).load()


def test_images_with_channels_last_are_refused() -> None:
    images, labels = torch.zeros((20, 8, 8, 3), dtype=torch.uint8), torch.arange(20) % 2
    last, first = ((x, labels) for x in (images, images.permute(0, 3, 1, 2)))
    options: dict[str, Any] = {"weak": "none", "strong": "none", "num_clients": 2, "num_labels": 2, "validation": 0}
    with pytest.raises(ValueError, match=r"\(20, 8, 8, 3\) looks like .*; turn them with images\.permute\(0, 3, 1"):
        FederatedDataModule.from_datasets(last, last, **options).setup()
    FederatedDataModule.from_datasets(first, first, **options).setup()


def test_a_label_that_no_training_sample_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    pairs = samples((5,), 30, seed=2).tensors[0], torch.arange(30) % 2 + 1
    options: dict[str, Any] = {"weak": "none", "strong": "none", "num_clients": 2, "num_labels": 2, "validation": 0}
    FederatedDataModule.from_datasets(pairs, pairs, **options).setup()
    assert "no training sample has the label 0 (0); labels count from 0: subtract 1" in caplog.text
    caplog.clear()
    FederatedDataModule.from_datasets((pairs[0], pairs[1] - 1), (pairs[0] + 1, pairs[1] - 1), **options).setup()
    assert not caplog.records


@pytest.mark.parametrize(("shape", "pixels"), [((5,), False), ((2, 100), False), ((1, 8, 8), False), ((1, 8, 8), True)])
def test_samples_for_training_and_testing_alike_are_counted(
    caplog: pytest.LogCaptureFixture, shape: tuple[int, ...], pixels: bool
) -> None:
    train = (samples(shape, 30, seed=2).tensors[0] * 50).to(torch.uint8 if pixels else torch.float32)
    test = torch.cat([train[:3], train[:1], train + 1])
    test[-1] = train[-1]
    test[-1].flatten()[-1] += 1  # equal in all values but one
    labels = [torch.arange(len(part)) % 2 for part in (train, test)]
    options: dict[str, Any] = {"weak": "none", "strong": "none", "num_clients": 2, "num_labels": 2, "validation": 0}
    FederatedDataModule.from_datasets((train, labels[0]), (test, labels[1]), **options).setup()
    (line,) = [message for message in caplog.messages if "test accuracies" in message]
    noun = "image" if pixels else "sample"
    assert f": 4 of 34 test {noun}s equal a training {noun}: if they are the same {noun}s, test accuracies are" in line


def test_samples_with_a_gradient_can_be_compared() -> None:
    """As the features of a network may have."""
    x = samples((5,), 30, seed=2).tensors[0].requires_grad_()
    split = ImageSplit(x, torch.arange(30) % 2)
    assert equal_samples.count_equal(split, split) == 30


def test_many_samples_and_those_of_the_package_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = samples((5,), 30, seed=2).tensors[0], torch.arange(30) % 2
    options: dict[str, Any] = {"weak": "none", "strong": "none", "num_clients": 2, "num_labels": 2, "validation": 0}
    monkeypatch.setattr(equal_samples, "MOST_COMPARED", 59)
    FederatedDataModule.from_datasets(pairs, pairs, **options).setup()
    monkeypatch.undo()
    monkeypatch.setattr(federated_data, "count_equal", lambda train, test: 1)
    FederatedDataModule("digits", num_clients=2, num_labels=10).setup()
    FederatedDataModule(BreastCancer(), **options).setup()
    assert not caplog.records


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(20, 4, dtype=torch.complex64), "are complex numbers; give real and imaginary parts as channels"),
        (torch.zeros(20, 8, 8, dtype=torch.uint8), r"are 8-bit numbers of shape \(8, 8\); grey images need a channel"),
    ],
)
def test_numbers_that_would_be_misread_are_refused(values: Tensor, message: str) -> None:
    pairs = values, torch.arange(20) % 2
    with pytest.raises(ValueError, match=f"data.dataset: train samples {message}"):
        FederatedDataModule.from_datasets(pairs, pairs, weak="none", strong="none", num_clients=2, num_labels=2)


def test_a_partition_in_python_is_an_object() -> None:
    with pytest.raises(ValueError, match=r"data\.partition is 'Iid'; in Python give an object, such as Iid\(\)"):
        FederatedDataModule("digits", partition="Iid")  # type: ignore[arg-type]


def test_tensors_need_one_label_for_each_sample() -> None:
    with pytest.raises(ValueError, match="4 samples and 3 labels; give one for each"):
        federation_of((torch.zeros(4, 2), torch.zeros(3)))
    with pytest.raises(
        ValueError, match=r"the arrays are float64 \(3, 2\) and <U1 \(3,\); give numbers.*Labels are class numbers 0, 1"
    ):
        federation_of((np.zeros((3, 2)), np.array(["a", "b", "a"])))
    pair = (torch.randn(9, 2), torch.arange(9) % 3)
    with pytest.raises(ValueError, match=r"data\.dataset: test is missing; give it samples with labels"):
        FederatedDataModule.from_datasets(pair, None, weak="none", strong="none").setup()  # type: ignore[arg-type]
    assert federation_of(pair).num_classes == 3


def federation_of(pair: tuple[Any, Any]) -> FederatedDataModule:
    return FederatedDataModule.from_datasets(pair, pair, weak="none", strong="none")


# Hugging Face


class Split(list):  # type: ignore[type-arg]
    """Rows with named columns, as the library gives them."""

    features: Any

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def pictures(count: int, seed: int) -> Split:
    generator = np.random.default_rng(seed)
    split = Split(
        {"img": Image.fromarray(generator.integers(0, 255, (9, 9, 3), dtype=np.uint8)), "y": k % 2, "who": f"w{k % 3}"}
        for k in range(count)
    )
    split.features = {"y": SimpleNamespace(names=["cat", "dog"])}
    return split


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library ``datasets``."""
    module = ModuleType("datasets")
    found = {"train": pictures(12, 0), "test": pictures(6, 1), "extra": pictures(4, 2)}
    module.load_dataset = lambda path, name: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def hugging_face(**settings: Any) -> HuggingFace:
    defaults: dict[str, Any] = {"sample_column": "img", "label_column": "y", "image_size": 8}
    return HuggingFace("any/name", **defaults | settings)


@pytest.mark.usefixtures("library")
def test_columns_and_splits_of_hugging_face_are_named() -> None:
    loaded = hugging_face(client_column="who", unlabeled_split="extra").load()
    assert loaded.spec.class_names == ("cat", "dog")
    assert loaded.spec.in_shape == (3, 8, 8)
    assert loaded.train.labels.tolist() == [0, 1] * 6 + [-1] * 4
    assert loaded.train.client_ids is not None
    assert loaded.train.client_ids.tolist() == [0, 1, 2] * 4 + [0, 1, 2, 0]
    for settings, message in (
        ({"sample_column": "image"}, "there is no column 'image'; there are img, y, who"),
        ({"train_split": "all"}, "'any/name' has no split 'all'; there are train, test, extra"),
        ({"client_column": "site"}, r"no column 'site' \(client_column\); there are img, y, who"),
    ):
        with pytest.raises(ValueError, match=rf"data\.dataset: .*{message}"):
            hugging_face(**settings).load()


def test_the_extra_is_named_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[huggingface\]"') as caught:
        FederatedDataModule(hugging_face(), weak="none", strong="none")
    assert "\n" not in str(caught.value)


def test_the_real_library_is_read(tmp_path: Path) -> None:
    real = pytest.importorskip("datasets")
    rows = [{"values": [0.0, float(k)], "label": k % 2} for k in range(12)]
    split = real.Dataset.from_list(rows).cast_column("label", real.ClassLabel(names=["a", "b"]))
    real.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    loaded = HuggingFace(str(tmp_path / "saved"), sample_column="values").load()
    assert loaded.train.images.tolist() == [row["values"] for row in rows]
    assert loaded.spec.class_names == ("a", "b")
    with pytest.raises(ValueError, match=r"data\.dataset: '.*nothing' cannot be loaded"):
        HuggingFace(str(tmp_path / "nothing")).load()


def test_columns_adapt_rows_from_python() -> None:
    rows = [{"x": [float(k), 1.0], "y": k % 2} for k in range(20)]
    columns = Columns(rows, sample="x", label="y")
    data = FederatedDataModule.from_datasets(
        columns, columns, Columns(rows, "x", None), weak="none", strong="none", num_clients=2, num_labels=4
    )
    data.setup()
    assert data.local_data(0, 1).images.shape == (40, 2)


@pytest.mark.parametrize("mode", ["P", "1", "L", "RGB"])
def test_pictures_of_every_mode_become_brightness(mode: str) -> None:
    """The values of a palette's picture are numbers of colours, and those of a bitmap are true or false."""
    picture = Image.new("RGB", (2, 2), (255, 255, 255)).convert(mode)
    sample, label = Columns([{"image": picture, "label": 1}])[0]
    assert sample.dtype == torch.uint8
    assert sample.shape == ((3 if mode in ("P", "RGB") else 1), 2, 2)
    assert sample.min() == 255
    assert label == 1


def test_pictures_of_hugging_face_are_resized_as_new_images_are(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    picture = Image.fromarray(torch.randint(0, 256, (17, 29, 3), dtype=torch.uint8, generator=generator).numpy())
    picture.save(tmp_path / "picture.png")
    sample, _ = Columns([{"image": picture, "label": 1}], image_size=8)[0]
    assert torch.equal(sample, read_image(tmp_path / "picture.png", (3, 8, 8)))


def test_rows_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.dataset: there is no row"):
        Columns([])


# Views of one's own, on several ranks and after resuming


def jitter(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def batched(x: Tensor, keys: Tensor) -> Tensor:
    return GaussianNoise(0.3)(x, keys)


def own_views() -> FederatedDataModule:
    """One view of each kind: a transform of a sample, and a function of a batch and keys."""
    return federation(weak=PerSample(jitter), strong=batched, num_clients=4)


def fit(folder: Path, **settings: Any) -> dict[str, Tensor]:
    algorithm = FixMatch(network=partial(MLP, hidden=(8,)), threshold=0.3, server_epochs=1)
    resume = settings.pop("ckpt_path", None)
    torch.manual_seed(len(folder.name))  # the global generator plays no part
    toy_trainer(folder, precision="64-true", **settings).fit(algorithm, own_views(), ckpt_path=resume)
    return weights(algorithm)


def test_views_of_ones_own_draw_the_same_on_two_ranks(tmp_path: Path) -> None:
    one = fit(tmp_path / "one", max_rounds=2)
    two = fit(tmp_path / "two ranks", max_rounds=2, strategy="ddp_fork", devices=2)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-9, atol=1e-9)


def test_views_of_ones_own_draw_the_same_after_resuming(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", max_rounds=4)
    fit(tmp_path / "first half", max_rounds=2)
    (last,) = (tmp_path / "first half").rglob("last.ckpt")
    assert_same(whole, fit(tmp_path / "second half", max_rounds=4, ckpt_path=str(last)))


def test_views_of_ones_own_draw_the_same_in_both_local_trainers(tmp_path: Path) -> None:
    one, three = (fit(tmp_path / str(n), max_rounds=2, clients_at_once=n) for n in (1, 3))
    for name in one:
        torch.testing.assert_close(one[name], three[name], rtol=1e-10, atol=1e-10)
