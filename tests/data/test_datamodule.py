from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data import datasets
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.inputs import Inputs
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.data.partition.base import Dirichlet, FromFile, Shards
from tests.data.helpers import own, samples, set_up
from tests.toy import ToyData

TRAIN = 1442  # training images of digits
make_real_views = Inputs.views


def scaled(images: Tensor, keys: Tensor) -> Tensor:
    return images.float() / 255


VIEWS = Views(scaled, scaled, scaled)


@pytest.fixture(autouse=True)
def plain_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views are another module's matter: all three are the image scaled to 0..1."""
    monkeypatch.setattr(Inputs, "views", lambda self, *dtype: VIEWS)


def make(**settings: Any) -> FederatedDataModule:
    data = FederatedDataModule(**{"num_clients": 10, "num_labels": 50, **settings})
    data.setup("fit")
    return data


def parties(data: FederatedDataModule) -> list[LocalData]:
    return [data.local_data(party, 1) for party in range(sampling.SERVER, data.num_clients)]


def all_indices(data: FederatedDataModule) -> Tensor:
    return torch.cat([torch.cat([local.labeled, local.unlabeled]) for local in parties(data)])


def equal(ours: LocalData, theirs: LocalData) -> bool:
    pairs = ((getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(LocalData))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_server_holds_the_labels_and_clients_hold_none() -> None:
    data = make()
    server = data.local_data(sampling.SERVER, 1)
    assert server.labels.bincount().tolist() == [5] * 10
    assert torch.equal(server.labels, data.true_labels(server.labeled))
    assert len(server.unlabeled) == 0
    for party in range(10):
        client = data.local_data(party, 1)
        assert len(client.labeled) == len(client.labels) == 0
        assert len(client.unlabeled) == (TRAIN - 144 - 50) // 10


def test_clients_hold_the_labels_when_configured_so() -> None:
    data = make(label_location="clients", partition=Dirichlet(0.5))
    clients = [data.local_data(party, 1) for party in range(10)]
    assert sum(len(client.labels) for client in clients) == 50
    assert torch.cat([client.labels for client in clients]).bincount().tolist() == [5] * 10
    assert all(torch.equal(client.labels, data.true_labels(client.labeled)) for client in clients)
    assert len(data.local_data(sampling.SERVER, 1).labeled) == 0


def test_true_labels_of_unlabelled_images_are_out_of_reach() -> None:
    client = make().local_data(0, 1)
    tensors = {field.name for field in fields(client) if isinstance(getattr(client, field.name), Tensor)}
    assert tensors == {"images", "labeled", "labels", "unlabeled"}
    assert client.labels.shape == client.labeled.shape
    assert not [value for value in vars(client).values() if isinstance(value, FederatedDataModule)]


def test_scrambled_hidden_labels_change_nothing_a_party_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(label_location="clients", partition=Dirichlet(0.3), validation="test")
    first.split.save(tmp_path / "partition.json")
    visible = torch.cat([local.labeled for local in parties(first)])
    load = datasets.load

    def scrambled(*arguments: Any) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        spec, train, test = load(*arguments)
        labels = (train.labels + 3) % 10
        labels[visible] = train.labels[visible]
        return spec, ImageSplit(train.images, labels), test

    monkeypatch.setattr(datasets, "load", scrambled)
    source = FromFile(str(tmp_path / "partition.json"))
    second = make(label_location="clients", partition=source, validation="test")
    assert not torch.equal(first.true_labels(first.unlabeled_pool()), second.true_labels(first.unlabeled_pool()))
    assert all(equal(a, b) for a, b in zip(parties(first), parties(second), strict=True))
    assert torch.equal(first.unlabeled_pool(), second.unlabeled_pool())


def test_views_are_those_of_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "views", make_real_views)
    data = make()
    client = data.local_data(3, 1)
    plain = client.plain(client.unlabeled[:5])
    pixels = client.images[client.unlabeled[:5]].float() / 255
    torch.testing.assert_close(plain, (pixels - data.spec.mean[0]) / data.spec.std[0])
    for view in (client.weak, client.strong):
        assert view(client.unlabeled[:5], "test").shape == (5, 1, 8, 8)
    images = torch.cat([x for x, _ in data.evaluation_batches("validate")])
    assert abs(float(images.mean())) < 0.1
    assert abs(float(images.std()) - 1) < 0.1


def test_validation_images_are_nobodys() -> None:
    data = make(validation=0.2)
    dealt = set(all_indices(data).tolist())
    images = torch.cat([x for x, _ in data.evaluation_batches("validate")])
    labels = torch.cat([y for _, y in data.evaluation_batches("validate")])
    assert len(images) == round(0.2 * TRAIN)
    outside = torch.tensor(sorted(set(range(TRAIN)) - dealt))
    stored = data.local_data(0, 1).plain(outside)
    assert all((stored == image).flatten(1).all(dim=1).any() for image in images)
    share = labels.bincount().double() / data.true_labels(torch.arange(TRAIN)).bincount()
    assert (share - 0.2).abs().max() < 0.01


def test_validation_can_watch_the_test_images_or_be_left_out() -> None:
    watching = make(validation="test")
    assert watching.has_validation
    watched, tested = ([*watching.evaluation_batches(stage)] for stage in ("validate", "test"))
    torch.testing.assert_close(watched, tested, rtol=0, atol=0)
    without = make(validation=0)
    assert not without.has_validation
    assert list(without.evaluation_batches("validate")) == []


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_share_the_evaluation_batches(ranks: int) -> None:
    data = make(eval_batch_size=100)
    whole = [labels.tolist() for _, labels in data.evaluation_batches("test")]
    parts = [[y.tolist() for _, y in data.evaluation_batches("test", shard=(rank, ranks))] for rank in range(ranks)]
    assert sorted(batch for part in parts for batch in part) == sorted(whole)


def test_second_setup_does_nothing_and_a_new_seed_deals_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make()
    split, images = data.split, data.local_data(0, 1).images
    data.setup("test")
    assert data.split is split
    assert data.local_data(0, 1).images is images
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    data.setup("fit")
    assert data.split.hash != split.hash
    assert data.local_data(0, 1).seed == data.split.seed == 1


def test_unlabeled_pool_is_every_clients_images_in_order() -> None:
    for location in ("server", "clients"):
        data = make(label_location=location)
        pool = data.unlabeled_pool()
        expected = torch.cat([torch.cat([c.labeled, c.unlabeled]) for c in parties(data)[1:]]).sort().values
        assert torch.equal(pool, expected)


def test_images_outside_the_server_include_those_of_no_client() -> None:
    """Seven equal parts leave a remainder; images of a quick trial that are not used stay out."""
    data = make(num_clients=7, max_train_images=300)
    outside, pool = set(data.images_outside_the_server().tolist()), set(data.unlabeled_pool().tolist())
    remainder = outside - pool
    assert pool < outside
    assert 0 < len(remainder) < 7
    assert not outside & set(data.split.server_labeled.tolist())
    assert not outside & set(data._validation.tolist())
    assert len(outside) == 300 - len(data._validation) - len(data.split.server_labeled)


def test_views_compute_in_the_type_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """64-bit views are not 32-bit ones that were widened."""
    monkeypatch.setattr(Inputs, "views", make_real_views)
    data = make()
    single, double = (data.local_data(0, 1, dtype) for dtype in (torch.float32, torch.float64))
    rows = single.unlabeled[:5]
    mean, std = (torch.tensor(c, dtype=torch.float64)[:, None, None] for c in (data.spec.mean, data.spec.std))
    exact = (data._train.images[rows].double() / 255 - mean) / std
    torch.testing.assert_close(double.plain(rows), exact, rtol=1e-14, atol=1e-14)
    assert not torch.equal(double.plain(rows), single.plain(rows).double())
    torch.testing.assert_close(double.strong(rows, "x"), single.strong(rows, "x").double(), rtol=1e-5, atol=1e-5)
    batches = zip(data.evaluation_batches("test", torch.float64), data.evaluation_batches("test"), strict=True)
    for (x, _), (y, _) in batches:
        torch.testing.assert_close(x, y.double(), rtol=1e-5, atol=1e-5)


def test_quick_trials_use_balanced_subsets() -> None:
    data = make(max_train_images=300, max_test_images=50)
    assert torch.cat([y for _, y in data.evaluation_batches("test")]).bincount().tolist() == [5] * 10
    validation = torch.cat([y for _, y in data.evaluation_batches("validate")])
    assert validation.bincount().tolist() == [3] * 10
    assert data.true_labels(all_indices(data)).bincount().tolist() == [27] * 10
    assert make(max_train_images=10**6).split.hash == make().split.hash


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_everything_moves_to_the_gpu() -> None:
    data, still = make(label_location="clients"), make(label_location="clients")
    data.to("cuda")
    for ours, theirs in zip(parties(data), parties(still), strict=True):
        for name in ("images", "labeled", "labels", "unlabeled"):
            assert getattr(ours, name).device.type == "cuda"
            assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name))
    assert data.unlabeled_pool().device.type == "cuda"
    images, labels = next(iter(data.evaluation_batches("validate")))
    assert images.device.type == labels.device.type == "cuda"
    assert data.true_labels(data.unlabeled_pool()).device.type == "cuda"


def test_prepare_data_downloads_only_when_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(datasets, "load", lambda *arguments: calls.append(arguments))
    FederatedDataModule("mnist").prepare_data()
    assert calls == []
    FederatedDataModule("mnist", root="somewhere", download=True).prepare_data()
    assert calls == [("mnist", "somewhere", True)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "imagenot"}, r"data\.dataset: 'imagenot' is not a known data set"),
        ({"num_clients": 0}, r"data\.num_clients must be a whole number from 1 .* got 0"),
        ({"num_clients": 2.5}, r"data\.num_clients must be a whole number"),
        ({"num_clients": True}, r"data\.num_clients must be a whole number"),
        ({"num_labels": 0}, r"data\.num_labels must be a whole number from 1 .*, or \"all\"; got 0"),
        ({"num_labels": "some"}, r"data\.num_labels must be"),
        ({"label_location": "cloud"}, r"data\.label_location must be one of server, clients; got cloud"),
        ({"validation": 1.0}, r"data\.validation must be a fraction from 0 to below 1, or \"test\"; got 1\.0"),
        ({"validation": float("nan")}, r"data\.validation must be"),
        ({"validation": "train"}, r"data\.validation must be"),
        ({"weak": "much"}, r"data\.weak must be one of auto, flip_crop, crop, none; got much"),
        ({"strong": "much"}, r"data\.strong must be one of auto, fixmatch, semifl"),
        ({"normalize": {"mean": [0.5]}}, r"data\.normalize must be true, false, or \{mean"),
        ({"normalize": {"mean": [0.5] * 3, "std": [1.0] * 3}}, r"a mean and a std for each of 1 channels"),
        ({"max_test_images": 0}, r"data\.max_test_images must be"),
        ({"partition": "Iid"}, r"data\.partition is 'Iid'; in Python give an object"),
    ],
)
def test_senseless_values_are_refused_by_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(**settings)


def test_an_attribute_that_is_set_after_setup_is_used_by_the_next_one() -> None:
    data = ToyData(num_clients=4)
    data.setup()
    first = data.split
    data.client_batch_size = 7
    data.setup()
    assert data.split is first  # nothing that was drawn depends on it
    data.partition, data.num_clients, data.num_labels = Shards(2), 6, 9
    data.normalize = False
    data.setup()
    assert len(data.split.clients) == 6
    assert len(data.split.server_labeled) == 9
    fresh = ToyData(partition=Shards(2), num_clients=6, num_labels=9, normalize=False)
    fresh.setup()
    assert fresh.split.hash == data.split.hash
    batch, expected = (next(iter(each.evaluation_batches("test")))[0] for each in (data, fresh))
    assert torch.equal(batch, expected)
    assert batch.min() >= 0  # pixels that are not normalised


def test_test_images_and_new_images_compute_in_the_type_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 64 bits, ``predict`` sees the values that ``test`` sees."""
    monkeypatch.setattr(Inputs, "views", make_real_views)
    Image.fromarray(np.full((8, 8), 77, dtype=np.uint8)).save(tmp_path / "new.png")
    (tmp_path / "new.heic").write_bytes(b"")
    data = make(predict_root=str(tmp_path))
    assert next(data.evaluation_batches("test", torch.float64))[0].dtype == torch.float64
    (images, labels), *_ = data.predict_batches(torch.float64)
    expected = torch.full((1, 1, 8, 8), 77 / 255, dtype=torch.float64)
    torch.testing.assert_close(images, (expected - 0.3052) / 0.3760, rtol=0, atol=1e-14)
    assert (data.predict_files(), labels.tolist()) == (["new.png"], [-1])
    assert "left out: .heic (1)" in data.reading.warnings[0]


def test_the_hash_of_own_data_covers_samples_and_labels() -> None:
    hashes = set()
    for change in ("nothing", "nothing", "sample", "label"):
        x, y = (part.clone() for part in samples((5,)).tensors)
        x[3, 2] += change == "sample"
        y[3] = 1 - y[3] if change == "label" else y[3]
        hashes.add(set_up(own((x, y), samples((5,), 20))).own_data_hash())
    assert len(hashes) == 3
    assert make().own_data_hash() == ""
