from __future__ import annotations

import logging
import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedAvg, FedMatch, FixMatch, SemiFL
from lightning_fedssl.callbacks import CollapseDetector
from lightning_fedssl.data import (
    BreastCancer,
    Compose,
    DataSource,
    FeatureMask,
    FederatedDataModule,
    FullyLabeledClients,
    GaussianNoise,
    LoadedData,
    PerSample,
    Scaling,
    Signals,
    TimeMask,
)
from lightning_fedssl.data.augment.custom import adapt, check_view
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.sources.base import number_clients
from lightning_fedssl.models import MLP, SignalCNN
from tests.toy import assert_same, toy_trainer, weights

SHAPES = [(5,), (2, 16), (4, 6, 6)]


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def samples(shape: tuple[int, ...], count: int = 60, seed: int = 0) -> TensorDataset:
    """Two classes whose means differ."""
    labels = torch.arange(count) % 2
    noise = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(noise + labels.view(-1, *[1] * len(shape)), labels)


def federation(shape: tuple[int, ...] = (5,), **settings: Any) -> FederatedDataModule:
    defaults: dict[str, Any] = {"weak": "none", "strong": GaussianNoise(0.5), "num_labels": 8, "num_clients": 3}
    return FederatedDataModule.from_datasets(samples(shape), samples(shape, 20, 1), **defaults | settings)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_of_any_shape_are_normalised_and_trained_on(shape: tuple[int, ...], tmp_path: Path) -> None:
    data = federation(shape)
    assert data.in_shape == shape
    algorithm = SemiFL(network=partial(MLP, hidden=(8,)), threshold=0.5, server_epochs=1)
    toy_trainer(tmp_path, max_rounds=1).fit(algorithm, data)
    assert algorithm.server.parameters["network.hidden.0.weight"].shape == (8, int(np.prod(shape)))
    values = data.local_data(0, 1).plain(torch.arange(60))
    dimensions = [0, *range(2, values.ndim)]
    torch.testing.assert_close(values.mean(dimensions), torch.zeros(shape[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(values.std(dimensions, correction=0), torch.ones(shape[0]), atol=1e-5, rtol=0)


def test_the_stored_values_stay_as_they_are() -> None:
    data = federation((5,), weak=Scaling(), validation=0)
    data.setup()
    local, rows = data.local_data(0, 1), torch.arange(60)
    before = local.images.clone()
    for view in (local.plain, partial(local.weak, purpose="a"), partial(local.strong, purpose="a")):
        view(rows)
    assert torch.equal(local.images, before)
    assert torch.equal(before, samples((5,)).tensors[0])


def test_sequential_and_vectorized_local_training_see_the_same_views(tmp_path: Path) -> None:
    finals = []
    for at_once in (1, 3):
        algorithm = SemiFL(network=partial(MLP, hidden=(8,)), threshold=0.5, server_epochs=1)
        data = federation((5,), weak=Scaling(), strong=Compose([GaussianNoise(), FeatureMask()]))
        trainer = toy_trainer(tmp_path / str(at_once), clients_at_once=at_once, max_rounds=2, precision="64-true")
        trainer.fit(algorithm, data)
        finals.append(weights(algorithm))
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name], rtol=1e-10, atol=1e-10)


def test_the_same_seed_gives_the_same_bits_with_views_of_one_sample(tmp_path: Path) -> None:
    finals = []
    for run in range(2):
        torch.manual_seed(run)
        algorithm = SemiFL(network=partial(MLP, hidden=(8,)), threshold=0.5, server_epochs=1)
        data = federation(weak=PerSample(lambda x: x + 0.1 * torch.randn_like(x)), strong=lambda x: x.flip(-1))
        toy_trainer(tmp_path / str(run), max_rounds=1).fit(algorithm, data)
        finals.append(weights(algorithm))
    assert_same(finals[0], finals[1])


SHIPPED = [GaussianNoise(), Scaling(), TimeMask(), FeatureMask(), Compose([Scaling(), TimeMask()])]


@pytest.mark.parametrize("view", SHIPPED, ids=lambda view: type(view).__name__)
def test_a_shipped_view_of_a_sample_depends_on_it_and_its_key_alone(view: Any) -> None:
    x, keys = torch.randn(7, 2, 30), sampling.sample_keys(3, 7)
    batch = view(x, keys)
    assert batch.shape == x.shape
    assert not torch.equal(batch, x)
    for row in range(7):
        assert torch.equal(view(x[row : row + 1], keys[row : row + 1])[0], batch[row])


def test_shipped_views_do_what_they_say() -> None:
    keys, ones = sampling.sample_keys(1, 4000), torch.ones(4000, 1, 10)
    noise = GaussianNoise(0.5)(ones, keys) - 1
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 0.5) < 0.01
    factors = Scaling(0.2)(ones, keys)[:, 0]
    assert torch.equal(factors, factors[:, :1].expand(-1, 10))
    assert 0.8 <= float(factors.min()) < 0.81
    assert 1.19 < float(factors.max()) <= 1.2
    hidden = TimeMask(0.3)(ones, keys)[:, 0] == 0
    assert torch.equal(hidden.sum(1), torch.full((4000,), 3))
    assert torch.equal(hidden.int().diff(dim=1).abs().sum(1).clamp(max=2), hidden.int().diff(dim=1).abs().sum(1))
    assert abs(float((FeatureMask(0.3)(ones, keys) == 0).double().mean()) - 0.3) < 0.01


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("view", [GaussianNoise, Scaling, TimeMask, FeatureMask])
def test_shipped_views_refuse_senseless_numbers(view: Any, value: float) -> None:
    with pytest.raises(ValueError, match=f"{view.__name__} is {value}: give a finite number"):
        view(value)


def test_a_torchvision_transform_is_seeded_by_the_key() -> None:
    from torchvision.transforms import v2

    view, keys = adapt(v2.RandomHorizontalFlip()), sampling.sample_keys(5, 40)
    x = torch.arange(40 * 4.0).view(40, 1, 1, 4)
    flipped = (view(x, keys) != x).flatten(1).any(1)
    assert 5 < int(flipped.sum()) < 35
    assert torch.equal((view(x[20:], keys[20:]) != x[20:]).flatten(1).any(1), flipped[20:])
    state = torch.get_rng_state()
    view(x, keys)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda x: x + torch.randn_like(x), "two calls with equal keys differ; draw from the keys, or wrap it in Per"),
        (lambda x: x - x.mean(0), "depends on the other samples"),
        (lambda x: x[:, :1], "floating numbers of the same shape"),
        (lambda x: x * math.nan, "the view gives values that are not finite, NaN or infinity: change it"),
        (lambda x: x / 0, "the view gives values that are not finite"),
    ],
)
def test_unusable_views_are_refused(view: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"data.weak: .*{message}"):
        check_view(adapt(view), torch.randn(3, 4), "data.weak")
    with pytest.raises(ValueError, match=f"data.strong: .*{message}"):
        federation((4,), strong=view).setup()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weak": "flip_crop"}, r"data\.weak: 'flip_crop' is a view of 8-bit images, but samples are numbers of shape"),
        ({"strong": "auto"}, r"data\.strong: 'auto' is a view of 8-bit images"),
        ({"image_size": 8}, r"data\.image_size is for image_folder"),
        ({"client_ids": [1, 2]}, r"2 client_ids for 60 samples"),
        ({"client_ids": ["a"] * 59 + [math.nan]}, "identifiers of clients are of the types float, str; give one type"),
        ({"class_names": ["a"]}, r"labels run from 0 to 1, but the 1 classes are numbered from 0 to 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federation(**settings)


def test_eight_bit_images_take_named_views_but_no_guessed_ones() -> None:
    labels = torch.arange(30) % 2
    grey = TensorDataset(torch.randint(256, (30, 1, 8, 8), dtype=torch.uint8), labels)
    data = FederatedDataModule.from_datasets(grey, grey, weak="crop", strong="fixmatch", num_clients=2, num_labels=4)
    data.setup()
    assert data.local_data(0, 1).images.dtype == torch.uint8
    with pytest.raises(ValueError, match=r"data\.weak: auto is not known .*; give one of flip_crop, crop, none, or a"):
        FederatedDataModule.from_datasets(grey, grey, weak="auto", strong="none")
    four = TensorDataset(torch.randint(256, (30, 4, 8, 8), dtype=torch.uint8), labels)
    with pytest.raises(ValueError, match=r"data\.strong: 'fixmatch' needs 1 or 3 channels, not 4"):
        FederatedDataModule.from_datasets(four, four, weak="crop", strong="fixmatch")


def test_a_view_of_images_gets_pixels_from_0_to_1() -> None:
    images = torch.full((30, 1, 4, 4), 51, dtype=torch.uint8)
    images[0] = 255
    pair = TensorDataset(images, torch.arange(30) % 2)
    seen: list[float] = []

    def view(x: Tensor) -> Tensor:
        seen.append(float(x.max()))
        return x

    data = FederatedDataModule.from_datasets(pair, pair, weak=view, strong="none", num_clients=2, num_labels=4)
    data.setup()
    local, rows = data.local_data(0, 1), torch.arange(1, 4)
    torch.testing.assert_close(local.weak(rows, "x"), local.plain(rows))
    assert seen[-1] == pytest.approx(0.2)


def test_a_view_of_images_computes_in_the_type_of_the_training() -> None:
    images = torch.arange(30 * 16).remainder(256).to(torch.uint8).view(30, 1, 4, 4)
    pair = TensorDataset(images, torch.arange(30) % 2)
    settings: dict[str, Any] = {"weak": lambda x: x, "strong": lambda x: x, "num_clients": 2, "num_labels": 4}
    data = FederatedDataModule.from_datasets(pair, pair, **settings)
    data.setup()
    rows = torch.arange(30)
    exact = data.local_data(0, 1, torch.float64)
    for view in (exact.weak, exact.strong):  # rounded to 32 bits, they differ by about 1e-7
        torch.testing.assert_close(view(rows, "x"), exact.plain(rows), rtol=0, atol=1e-14)
    assert data.local_data(0, 1).weak(rows, "x").dtype == torch.float32


def test_test_images_and_new_images_compute_in_the_type_of_the_training(tmp_path: Path) -> None:
    """In 64 bits, ``predict`` sees the values that ``test`` sees."""
    Image.fromarray(np.full((8, 8), 77, dtype=np.uint8)).save(tmp_path / "new.png")
    data = FederatedDataModule("digits", predict_root=str(tmp_path), num_clients=2, num_labels=10)
    data.setup()
    rows = torch.arange(3)
    evaluated, _ = next(data.evaluation_batches("test", torch.float64))
    assert torch.equal(data.test_batch(rows, torch.float64)[0], evaluated[:3])
    (images, _), *_ = data.predict_batches(torch.float64)
    expected = torch.full((1, 1, 8, 8), 77 / 255, dtype=torch.float64)
    torch.testing.assert_close(images, (expected - 0.3052) / 0.3760, rtol=0, atol=1e-14)


def test_values_that_mean_nothing_are_refused() -> None:
    broken = samples((3,))
    broken.tensors[0][7, 1] = float("nan")
    with pytest.raises(ValueError, match=r"1 of 60 train samples hold NaN or infinite values \(the first is sample 7"):
        FederatedDataModule.from_datasets(broken, samples((3,)), weak="none", strong="none")
    with pytest.raises(ValueError, match=r"training samples are \(3,\).*test samples \(4,\)"):
        FederatedDataModule.from_datasets(samples((3,)), samples((4,)), weak="none", strong="none")
    wide = TensorDataset(torch.zeros(4, 1, 2, 2, dtype=torch.int32), torch.arange(4) % 2)
    with pytest.raises(ValueError, match="no fixed range"):
        FederatedDataModule.from_datasets(wide, wide, weak="none", strong="none")


def test_labels_that_are_no_class_numbers_are_refused() -> None:
    dates = TensorDataset(torch.zeros(3, 2), torch.tensor([20230101, 20230102, 20230103]))
    with pytest.raises(ValueError, match="the largest of 3 training labels is 20230103; number the classes from 0"):
        FederatedDataModule.from_datasets(dates, dates, weak="none", strong="none")


def test_sixteen_bit_images_are_scaled_by_their_range() -> None:
    images = torch.tensor([0, 65535, 13107, 0], dtype=torch.int32).to(torch.uint16).view(4, 1, 1, 1)
    pair = TensorDataset(images, torch.tensor([0, 1, 0, 1]))
    data = FederatedDataModule.from_datasets(
        pair, pair, weak="none", strong="none", num_clients=1, num_labels=2, validation=0
    )
    data.setup()
    torch.testing.assert_close(data.local_data(0, 1).images.flatten(), torch.tensor([0, 1, 0.2, 0]))


@pytest.mark.parametrize("location", ["server", "clients"])
def test_natural_clients_hold_their_own_samples_and_test_samples(location: Any) -> None:
    ids = [f"site {k % 4}" for k in range(60)]
    data = federation(
        client_ids=ids, test_client_ids=["site 3", "elsewhere"] * 10, num_clients=4, label_location=location
    )
    data.setup()
    assert data.num_clients == 4
    for client in range(4):
        local = data.local_data(client, 1)
        held = torch.cat([local.labeled, local.unlabeled]).tolist()
        assert held
        assert {ids[i] for i in held} == {f"site {client}"}
    assert data.client_test_indices(3).tolist() == list(range(0, 20, 2))  # type: ignore[union-attr]
    assert data.client_test_indices(0).tolist() == []  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"data\.num_clients: 5, but the data have 4 clients; set 4"):
        federation(client_ids=ids, num_clients=5).setup()


def test_identifiers_of_test_samples_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="identifiers of clients are of the types int, str; give one type"):
        federation(client_ids=[0, 1] * 30, test_client_ids=["0", "1"] * 10)


@pytest.mark.parametrize(
    ("tested", "message"),
    [
        (["here", "elsewhere"] * 10, r"1 of 2 clients of the test samples \('elsewhere'\) have no training sample"),
        (list("abcd") * 5, r"4 of 4 clients of the test samples \('a', 'b', 'c', \.\.\.\) have no training sample"),
    ],
)
def test_clients_of_test_samples_alone_are_named(tested: list[str], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        federation(client_ids=["here"] * 60, test_client_ids=tested)


def test_numbers_of_other_types_and_test_samples_without_a_client_are_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = number_clients([np.int64(3), 5], [5.0, None, torch.tensor(3)], None)
    assert [part if part is None else part.tolist() for part in numbers] == [[0, 1], [1, -1, 0], None]


def test_some_clients_can_have_all_labels_and_the_others_none(tmp_path: Path) -> None:
    data = federation(
        partition=FullyLabeledClients(2), label_location="clients", num_labels="all", num_clients=5, weak=Scaling()
    )
    data.setup()
    counts = [(len(c.labeled), len(c.unlabeled)) for c in data.split.clients]
    assert all(labeled and not unlabeled for labeled, unlabeled in counts[:2])
    assert all(unlabeled and not labeled for labeled, unlabeled in counts[2:])
    toy_trainer(tmp_path, max_rounds=1).fit(FixMatch(network=partial(MLP, hidden=(4,))), data)
    with pytest.raises(ValueError, match=r"label_location: clients and data\.num_labels: all"):
        federation(partition=FullyLabeledClients(2)).setup()


class Pairs(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.sets = samples((5,)), samples((5,), 20, 1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.sets[0], batch_size=7, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.sets[1], batch_size=7)


def test_a_lightning_data_module_is_adapted_and_a_bare_one_is_refused(tmp_path: Path) -> None:
    data = FederatedDataModule(
        Pairs(), weak="none", strong="none", num_clients=3, num_labels=9, label_location="clients"
    )
    algorithm = FedAvg(network=partial(MLP, hidden=(4,)))
    toy_trainer(tmp_path, max_rounds=1).fit(algorithm, data)
    assert data.in_shape == (5,)
    with pytest.raises(TypeError, match=r"FederatedDataModule\(datamodule, weak=\.\.\.,"):
        toy_trainer(tmp_path).fit(FedAvg(network=MLP), Pairs())  # type: ignore[arg-type]


def test_a_run_on_rows_speaks_of_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    noise = GaussianNoise(0.1)
    data = FederatedDataModule(BreastCancer(), weak=noise, strong=noise, num_clients=4, num_labels=20)
    trainer = toy_trainer(tmp_path, max_rounds=1, enable_progress_bar=True, callbacks=CollapseDetector(1e-9, 1))
    model = SemiFL(network=partial(MLP, hidden=(8,)), threshold=0.5, server_epochs=1)
    with caplog.at_level(logging.INFO, logger="lightning_fedssl"):
        trainer.fit(model, data)
        trainer.predict(model, data)
    said = capsys.readouterr().out + caplog.text
    for words in ("server: 20 labelled samples", "samples of clients", "113 samples: "):
        assert words in said, said
    assert not re.search(r"(?<!\.)\bimages?\b", said), said


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (FedAvg, {"num_labels": 1000}), (FedAvg, {"num_clients": 1000}), (FedAvg, {"validation": 1e-9}),
        (SemiFL, {"num_labels": "all"}), (FixMatch, {"num_labels": "all"}), (FedMatch, {"num_labels": "all"}),
    ],
)  # fmt: skip
def test_a_refusal_of_rows_speaks_of_no_images(method: Any, changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"weak": "none", "strong": "none", "num_clients": 4, "num_labels": 20}
    data = FederatedDataModule(BreastCancer(), **settings | changes)
    with pytest.raises(ValueError, match=r"^((?!image).)*\b(samples|data)\b((?!image).)*$"):
        toy_trainer(Path(), logger=False).fit(method(network=MLP), data)


@pytest.mark.parametrize(("source", "shape", "classes"), [(BreastCancer(), (30,), 2), (Signals(300), (1, 64), 3)])
def test_embedded_examples_are_the_same_at_every_reading(source: Any, shape: tuple[int, ...], classes: int) -> None:
    first, second = source.load(), type(source)(**({"count": 300} if classes == 3 else {})).load()
    assert (first.spec.in_shape, first.spec.num_classes) == (shape, classes)
    assert torch.equal(first.train.images, second.train.images)
    assert set(first.test.labels.tolist()) == set(range(classes))


def test_the_network_for_signals_takes_signals_only() -> None:
    network: nn.Module = SignalCNN(num_classes=3, in_shape=(2, 20), width=4)
    assert network(torch.randn(5, 2, 20)).shape == (5, 3)
    with pytest.raises(ValueError, match="takes signals"):
        SignalCNN(in_shape=(3, 8, 8))


class Rows(DataSource):
    """Rows of numbers in two classes, whose fourth label of a part is replaced."""

    def __init__(self, part: str, label: float) -> None:
        self.part, self.label = part, label

    def load(self) -> LoadedData:
        def labels(part: str) -> Tensor:
            numbers = torch.arange(40.0) % 2
            numbers[3] = self.label if part == self.part else 1
            return numbers

        spec = DatasetSpec("rows", 2, (3,), (0.0,) * 3, (1.0,) * 3, ("a", "b"), pixels=False, usual_views=False)
        train, test = (ImageSplit(torch.zeros(40, 3), labels(part)) for part in ("train", "test"))
        return LoadedData(spec, train, test)


@pytest.mark.parametrize(
    ("part", "label", "message"),
    [
        ("train", 2, "labels run from 0 to 2, but the 2 classes are numbered from 0 to 1; renumber the labels"),
        (
            "train",
            -2,
            "there is a label -2, and classes are numbered from 0; give samples without a label",
        ),
        ("train", 0.5, "0.5 is no label; a label is the number of a class, from 0 to 1"),
        ("train", math.nan, "nan is no label"),
        ("test", -1, "there is a label -1"),
    ],
)
def test_labels_of_a_source_that_name_no_class_are_refused(part: str, label: float, message: str) -> None:
    data = FederatedDataModule(Rows(part, label), weak="none", strong="none", num_clients=2, num_labels=4)
    with pytest.raises(ValueError, match=f"^data.dataset Rows: .*{message}"):
        data.setup()


def test_labels_of_a_source_may_be_whole_numbers_of_any_type_or_left_out() -> None:
    data = FederatedDataModule(Rows("train", -1), weak="none", strong="none", num_clients=2, num_labels=4)
    data.setup()
    assert data.true_labels(torch.tensor([2, 3, 4])).tolist() == [0, -1, 0]


class Mistaken(DataSource):
    """A source of a user's own with one mistake."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def load(self) -> LoadedData:
        x, labels = samples((2,)).tensors
        if self.mistake == "nan":
            x[3, 1] = math.nan
        names = ("a",) if self.mistake == "names" else ("a", "b")
        spec = DatasetSpec(
            "mine", 2, (2, 5) if self.mistake == "shape" else (2,), (0.0,) if self.mistake == "mean" else (0.0, 0.0),
            (1.0, 0.0 if self.mistake == "std" else 1.0), names, pixels=False, usual_views=False,
        )  # fmt: skip
        clients: Any = {"clients": torch.arange(50), "texts": ["north"] * 60}.get(self.mistake)
        files = tuple("ab") if self.mistake == "files" else ()
        train = ImageSplit(x, labels[:50] if self.mistake == "labels" else labels, clients, files)
        whole: Any = (spec, train, train) if self.mistake == "tuple" else LoadedData(spec, train, train)
        return None if self.mistake == "none" else whole  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("labels", "the train data have 60 samples and 50 labels; give one for each"),
        ("clients", "the train data have 60 samples and 50 client_ids; give one for each"),
        ("texts", "the train data have client_ids that are no int64 tensor; number the clients from 0"),
        ("files", "the train data have 60 samples and 2 files; give one for each, or none"),
        ("nan", r"the train data hold NaN or infinite values in 1 of 60 samples \(the first is sample 3\)"),
        ("names", "the DatasetSpec has 2 classes and 1 class_names; name them all"),
        ("mean", "the DatasetSpec has 1 means and 2 standard deviations; give one of each"),
        ("std", "give finite means, and deviations above 0"),
        ("shape", r"the train data have samples of shape \(2,\), and in_shape of DatasetSpec is \(2, 5\)"),
    ],
)
def test_a_mistake_in_a_source_of_a_user_s_own_is_named(mistake: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"data.dataset: Mistaken: .*{message}"):
        FederatedDataModule(Mistaken(mistake), weak="none", strong="none", num_clients=2, num_labels=4).setup()


@pytest.mark.parametrize(("mistake", "found"), [("none", "NoneType"), ("tuple", "tuple")])
def test_a_source_returns_loaded_data(mistake: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"data.dataset: Mistaken.load returned {found}; return LoadedData"):
        FederatedDataModule(Mistaken(mistake), weak="none", strong="none", num_clients=2, num_labels=4)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module.X", "no_such_module.X: no_such_module cannot be imported .*No module named"),
        ("tests.test_sources.Nothing", "the module tests.test_sources has no Nothing"),
        ("torch.nn.Linear", "torch.nn.Linear is no source of data; give a class derived from DataSource"),
    ],
)
def test_a_path_that_names_no_source_says_why(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"data.dataset: .*{message}"):
        FederatedDataModule(path)
