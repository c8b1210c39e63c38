"""Data of one's own from PyTorch data sets, tensors and arrays."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callbacks import PseudoLabelQuality
from lightning_fedssl.cli.lightning_cli import FederatedCLI
from lightning_fedssl.data import Arrays, Datasets, FederatedDataModule, FromFile
from lightning_fedssl.models import MLP
from tests.data.helpers import Rows, federation, own, samples, set_up, without_labels
from tests.toy import toy_trainer


def semifl(**settings: Any) -> SemiFL:
    defaults: dict[str, Any] = {"threshold": 0.5, "server_epochs": 1}
    return SemiFL(network=partial(MLP, hidden=(8,)), **defaults | settings)


@pytest.mark.parametrize("shape", [(5,), (2, 16), (4, 6, 6)], ids=str)
def test_numbers_of_any_shape_are_normalised_and_trained_on(shape: tuple[int, ...], tmp_path: Path) -> None:
    data = federation(shape)
    assert data.in_shape == shape
    algorithm = semifl()
    toy_trainer(tmp_path, max_rounds=1).fit(algorithm, data)
    assert algorithm.server.parameters["network.hidden.0.weight"].shape == (8, int(np.prod(shape)))
    values = data.local_data(0, 1).plain(torch.arange(60))
    dimensions = [0, *range(2, values.ndim)]
    torch.testing.assert_close(values.mean(dimensions), torch.zeros(shape[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(values.std(dimensions, correction=0), torch.ones(shape[0]), atol=1e-5, rtol=0)


def test_samples_with_a_gradient_are_detached() -> None:
    x = samples((3,)).tensors[0].requires_grad_()
    data = set_up(own((x, torch.arange(60) % 2), samples((3,), 20)))
    assert not data.local_data(0, 1).images.requires_grad


def test_sixteen_bit_images_are_scaled_by_their_range() -> None:
    images = torch.tensor([0, 65535, 13107, 0], dtype=torch.int32).to(torch.uint16).view(4, 1, 1, 1)
    pair = TensorDataset(images, torch.tensor([0, 1, 0, 1]))
    data = set_up(own(pair), num_clients=1, num_labels=2, validation=0)
    torch.testing.assert_close(data.local_data(0, 1).images.flatten(), torch.tensor([0, 255, 51, 0]).byte())


def test_eight_bit_images_stay_bytes_and_must_have_channels_first() -> None:
    images, labels = torch.zeros((20, 8, 8, 3), dtype=torch.uint8), torch.arange(20) % 2
    first = images.permute(0, 3, 1, 2), labels
    data = set_up(own(first))
    assert data.local_data(0, 1).images.dtype == torch.uint8
    for wrong in (images, images[..., 0]):
        with pytest.raises(ValueError, match=r"train samples are torch\.uint8 of shape"):
            own((wrong, labels)).load()


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
    source = FromFile(str(tmp_path / "partition.json"))
    again = federation(unlabeled=without_labels(), **ids, num_clients=4, partition=source)
    again.setup()
    assert again.split.hash == data.split.hash
    with pytest.raises(ValueError, match="give client_ids and unlabeled_client_ids, or none of them"):
        federation(unlabeled=without_labels(), client_ids=ids["client_ids"])


def test_pseudo_labels_of_unknown_classes_count_in_the_mask_rate_only(tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    class Watch(PseudoLabelQuality):
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
    return FederatedCLI(arguments, run=False).datamodule  # type: ignore[no-any-return]


def test_data_sets_are_named_by_class_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    rows, own = "tests.data.helpers.Rows", "data.dataset.init_args"
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
    assert data.client_names == tuple(f"clinic {client}" for client in range(4))
    data.num_labels = 8
    data.setup()
    assert data.client_test_indices(1).tolist() == list(range(1, 20, 2))  # type: ignore[union-attr]


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
    assert FederatedDataModule(path, weak="none", strong="none").num_classes == 2
    for missing in ({}, {"test_labels": test.tensors[1], "validation": test.tensors[0]}, {"labels": test.tensors[1]}):
        np.savez(path, **arrays, **missing)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"signals\.npz' has train, .*; Arrays reads train, train_labels, test"):
            Arrays(path)
    Path(path).write_text("no arrays")
    with pytest.raises(ValueError, match=r"is not a readable file of numpy\.savez with arrays of numbers"):
        Arrays(path)
    with pytest.raises(FileNotFoundError, match=r"the file 'nowhere\.npz' does not exist"):
        Arrays("nowhere.npz")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client_ids": ["a"] * 59 + [7.0]}, "identifiers of clients are of several types"),
        ({"client_ids": ["a"] * 60, "test_client_ids": [1]}, "20 samples and 1 client_ids"),
        ({"test_client_ids": ["a"] * 20}, "test_client_ids need client_ids"),
        ({"class_names": ["a"]}, "1.0 is not a label|1 is not a label"),
        ({"validation": samples((4,))}, r"validation samples are \(4,\).*training samples \(5,\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federation(**settings)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64", "list"])
def test_labels_may_be_a_list_or_unsigned(kind: str) -> None:
    labels = [0, 1, 2] * 4
    pair: Any = (np.zeros((12, 2)), labels if kind == "list" else np.array(labels, dtype=kind))
    data = set_up(own(pair, class_names=["a", "b", "c"]), num_labels=3, validation=0)
    assert data.true_labels(torch.arange(12)).tolist() == labels
    assert FederatedDataModule(own(pair), weak="none", strong="none").num_classes == 3
    with pytest.raises(ValueError, match="2 is not a label"):
        own(pair, class_names=["a", "b"]).load()


def test_a_data_set_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="train is Rows; give a data set with samples"):
        Datasets(Rows(0), samples((5,))).load()


def test_tensors_need_one_label_for_each_sample() -> None:
    for pair in ((torch.zeros(4, 2), torch.zeros(3)), (np.zeros((3, 2)), np.array(["a", "b", "a"]))):
        with pytest.raises(ValueError, match=r"the arrays are .*; give numbers, one row for each sample"):
            own(pair)
