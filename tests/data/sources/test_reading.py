"""What other people's files hold: it is read rightly, reported, or refused."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fedssl.callbacks import RoundProgress
from lightning_fedssl.data import Datasets, FederatedDataModule, ImageFolder, ImageTable, SiteFolders, Table
from lightning_fedssl.data.sources.reading import Reading
from lightning_fedssl.task import MultiLabel, Regression
from tests.data.helpers import samples, set_up


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


# Tables


def column(name: str, change: dict[int, str], label: dict[int, str] | None = None) -> str:
    """A file of 60 rows with the columns x and ``name``, some cells of which are changed; rows count from 2."""
    rows = [f",{name},x,label"]
    for row in range(2, 62):
        other = change.get(row, f"{(row * 37) % 101 / 7:.3f}")
        rows.append(f'{row},"{other}",{(row * 17) % 23},{(label or {}).get(row, "ab"[row % 2])}')
    return "\n".join(rows) + "\n"


ALL = range(2, 62)
READ: list[tuple[str, dict[str, Any], int, str]] = [
    (column("y", {}), {}, 2, "columns: numeric y, x; left out '' (no name)"),
    (column("Unnamed: 0.1", {}), {}, 1, "'Unnamed: 0.1' (no name)"),
    (column("y", dict.fromkeys(ALL, "")), {}, 1, "'y' (no value)"),
    (column("y", {}), {"ignore": ["y"]}, 1, "'y' (ignore)"),
    (column("y", {3: "NA", 9: "", 10: "#N/A"}), {}, 2, "missing values: y 3"),
    *((column("y", {18: cell, 20: cell}), {}, 2, f"! y: 2 of 60 cells are not numbers: '{cell}' in row 18")
      for cell in ("?", "<5", "1,234", "12 mg", "inf")),
    (column("y", {row: str(3 * row) for row in ALL}), {}, 2, "! y: 60 different values in 60 rows"),
    (column("y", {row: str(row / 4) for row in ALL}), {}, 2, "! y: 60 different values in 60 rows"),
    (column("y", {row: str(100 + row // 3) for row in ALL}), {}, 2, "! y: 21 different values in 60 rows"),
    (column("y", {row: str(row % 5) for row in ALL} | {9: "-99"}), {}, 2, "! y: cells like '-99' in row 9 (1 in"),
    (column("y", dict.fromkeys(ALL, "950") | {9: "1.150"}), {}, 2, "! y: cells like '1.150' in row 9 (1 in"),
    (column("y", {9: "1e300"}), {}, 2, "! y: 1 of 60 cells are not numbers: '1e300' in row 9"),
    (column("y", {row: ("k", "NA", "")[row % 3] for row in ALL}), {}, 3, "categorical y (2 values)"),
    (column("y", {row: f"2024-02-{10 + row // 3}" for row in ALL}), {}, 1 + 20,
     "! y: 21 different values in 60 rows, as of a time (which needs a split_column)"),
    (column("y", {row: f"P{row}" for row in ALL}), {}, 1 + 48, "! y: 60 different values in 60 rows"),
    (column("y", {}) + ",,,\n" * 20, {}, 2, "! t.csv: rows without any value are left out (20 in"),
    *((column("y", {}, {3: word, 5: word}), {}, 2, f"! label: rows without a label are 2 of 60: '{word}' in row 3")
      for word in ("NA", "nan", "None", "?", "-1")),
    (column("y", {}, {3: ""}), {}, 2, "classes: a 24/6, b 24/5 (training/test); 1 training sample without a label"),
    (column("y", {}, dict.fromkeys(range(2, 40, 2), "A")), {}, 2, "! the classes 'A' and 'a' may be one"),
    (column("y", {row: ("train", "val", "test")[row % 3] for row in ALL}), {"split_column": "y"}, 1, "data: Table, 20"),
    (column("y", {row: ("train", "valid", "test")[row % 3] for row in ALL}), {"split_column": "y"}, 1, "20 validation"),
    (column("y", {row: ("00501", "94105", "80331")[row % 3] for row in ALL}), {}, 1 + 3, "categorical y (3 values)"),
    (column("y", {row: f"{52 + row % 3}7233689870338001" for row in ALL}), {}, 1 + 3, "categorical y (3 values)"),
    (column("y", {row: f"{1 + row * 7 % 5}/04/2021" for row in ALL}), {}, 1 + 5, "! y: cells like '5/04/2021' in"),
    (column("y", dict.fromkeys(ALL, "7")), {}, 2, "! columns with one value in all rows, which say nothing: y"),
    (column("y", {row: f"2024-0{1 + row * 7 % 5}-11" for row in ALL}), {}, 1 + 5, "! y: cells like '2024-05-11' in"),
    (column("y", {row: f"0.{row % 5} mg" for row in ALL}), {}, 1 + 5, "! y: cells like '0.2 mg' in row 2 are categ"),
    (column("y", {row: ("Male", "male ", "f")[row % 3] for row in ALL}), {}, 1 + 3,
     "! the categories of y 'Male' and 'male' may be one, spelled twice"),
    (column("y", {row: ("ill", "well")[row % 2] for row in ALL}), {}, 1 + 2, "! y decides the label in all of 60 rows"),
    (column("y", {row: str(4 + 3 * (row % 2)) for row in ALL}), {}, 2, "! y decides the label in all of 60 rows"),
    (column("y", {row: f"{1.7e9 + row * 37 % 101:.1f}" for row in ALL}), {}, 2, "! y: large numbers with small diff"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "settings", "features", "line"), READ)
def test_a_table_is_read_and_reported(text: str, settings: dict[str, Any], features: int, line: str) -> None:
    Path("t.csv").write_text(text)
    data = set_up(Table("t.csv", **settings), validation=0)
    assert data.in_shape == (features,)
    assert line in "\n".join(data.reading.lines())
    assert data.num_classes == 2 + ("'A'" in line)
    assert all("y" not in warning for warning in data.reading.warnings) or line.startswith("! ")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("x,label\n1,a\n", {}, "needs rows of train and of test"),
    (column("y", {row: ("train", "test", "tset")[row % 3] for row in ALL}), {"split_column": "y"}, "train, tset"),
    (column("y", {row: f"{row % 7},5" for row in ALL}), {}, "y: 60 of 60 cells are not numbers: '2,5' in row 2"),
    (column("y", dict.fromkeys(ALL, "1,234")), {}, "correct or empty them, or give categorical or ignore"),
    (column("y", {18: "?"}), {"strict": True}, "y: 1 of 60 cells are not numbers: '[?]' in row 18"),
    (column("y", dict.fromkeys(ALL, "k")), {"numeric": ["y"]}, "y: 60 of 60 cells are not numbers"),
    (column("x", {}), {}, "has several columns 'x'"),
    (column("y", {}), {"ignore": ["x", "y"]}, "no column of features"),
    (column("split", {row: ("train", "test")[row % 2] for row in ALL}), {}, "give split_column: split"),
    (column("y", {row: ("train", "test")[row % 2] for row in ALL}, {3: "NA"}), {"split_column": "y"},
     "row 3: a row of test needs a value of label"),
    *((column("y", {3: cell}), {"client_column": "y"}, "row 3: a row of train needs a value of y")
      for cell in ("", "?", "NA")),
    (column("y", {row: ("train", "test", "valid")[row % 3] for row in ALL}), {}, "give split_column: y"),
    (column("y", {}, {row: str(row) for row in ALL}), {}, "each fifth row of every class is a test row"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "settings", "message"), REFUSED)
def test_a_table_that_cannot_be_read_rightly_is_refused(text: str, settings: dict[str, Any], message: str) -> None:
    Path("t.csv").write_text(text)
    with pytest.raises(ValueError, match=f"data.dataset: .*{message}"):
        set_up(Table("t.csv", **settings))


# Arrays and data sets


def arrays(**changed: Any) -> str:
    x, y = np.random.default_rng(0).normal(size=(90, 5)), np.arange(90) % 3
    test = np.random.default_rng(1).normal(size=(30, 5))
    np.savez("a.npz", **{"train": x, "train_labels": y, "test": test, "test_labels": y[:30]} | changed)
    return "a.npz"


LABELS = np.arange(90) % 3
SAID: list[tuple[dict[str, Any], str]] = [
    ({}, "data: Arrays, 90 training, 30 test samples of shape (5,)"),
    ({"train_labels": LABELS + 1, "test_labels": LABELS[:30] + 1}, "! no training sample has the class 0 (1 of 4"),
    ({"train_labels": LABELS * 2 + 3}, "! no training sample has the class 0, 1, 2, 4, 6 (5 of 8 classes)"),
    ({"train_labels": LABELS[:, None]}, "classes: 0 30/10, 1 30/10, 2 30/10"),
    ({"test": np.random.default_rng(0).normal(size=(90, 5))[30:60]}, "! 30 of 30 test samples have the content"),
    ({"train_labels": np.where(LABELS == 2, np.nan, LABELS), "test_labels": LABELS[:30] % 2},
     "classes: 0 30/20, 1 30/10 (training/test); 30 training samples without a label"),
    ({"train": np.eye(9)[[[0] * 9] * 90], "test": np.eye(9)[[[1] * 9] * 30]}, "! samples of shape (9, 9) have 9"),
    ({"unlabeled": np.zeros((3, 5)), "unlabeled_client_ids": ["n", "s", "s"]},
     "clients: 2: n 1/0, s 2/0 (samples/with a label)"),
    ({"unlabeled": np.zeros((3, 5)), "unlabeled_client_ids": ["1", "1.0", "North"]}, "! the clients '1' and '1.0' may"),
    ({"unlabeled": 1000 * np.random.default_rng(2).normal(size=(90, 5))}, "! most values of unlabeled samples lie far"),
    ({"test": 255 + 255 * np.random.default_rng(2).normal(size=(30, 5))}, "! most values of test samples lie far"),
    ({"train": 255 * np.random.default_rng(2).normal(size=(90, 5))}, "! most values of test samples lie far outside"),
    ({"validation": np.full((30, 5), 99.0), "validation_labels": LABELS[:30]}, "! most values of validation samples"),
    ({"train": LABELS[:, None] * [1.0, 5.0], "test": LABELS[:30, None] * [1, 5]}, "! feature 0 decides the label in"),
    ({"train": np.tile(np.random.default_rng(0).normal(size=(30, 5)), (3, 1)),
      "test": np.random.default_rng(0).normal(size=(30, 5))}, "! 30 of 30 test samples have the content"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "line"), SAID)
def test_arrays_are_reported(changed: dict[str, Any], line: str) -> None:
    assert line in "\n".join(set_up(arrays(**changed)).reading.lines())


@pytest.mark.parametrize("values", [np.random.default_rng(0).integers(0, 3, size=(120, 5)),
                                    np.random.default_rng(0).standard_t(2, size=(120, 5))])  # fmt: skip
def test_parts_of_one_kind_are_not_spoken_of(values: Any) -> None:
    """Rows that are equal by chance, and large values that are rare."""
    data = set_up(arrays(train=values[:90], test=values[90:]))
    assert not data.reading.warnings


def test_large_numbers_with_small_differences_are_standardised_in_64_bits() -> None:
    x = 1.7e9 + np.random.default_rng(0).normal(size=(90, 1)) + 20 * LABELS[:, None]
    data = set_up(arrays(train=x, test=x[:30]), weak="none", strong="none")
    given = next(data.evaluation_batches("test"))[0]
    assert given.dtype == torch.float32
    np.testing.assert_allclose(given.numpy(), (x[:30] - x.mean()) / x.std(), atol=1e-5)


@pytest.mark.parametrize("form", ["NFC", "NFD", "zero-width"])
def test_labels_that_look_the_same_are_named(form: Any) -> None:
    other = "s\u00e9ch\u200b\u00e9" if form == "zero-width" else unicodedata.normalize(form, "s\u00e9ch\u00e9")
    reading = Reading()
    reading.warn_of_names("classes", ["s\u00e9ch\u00e9", "brut", other])
    assert len(reading.warnings) == (form != "NFC")
    assert form == "NFC" or {"NFD": "e\\u0301", "zero-width": "\\u200b"}[form] in reading.warnings[0]


@pytest.mark.parametrize(("factor", "named"), [(1.08, True), (None, False)])
def test_a_number_to_predict_in_another_unit_is_named(factor: float | None, named: bool) -> None:
    rng = np.random.default_rng(0)
    euros = rng.normal(100, 20, 80).round(2)
    other = (euros * factor).round(2) if factor else euros + rng.normal(0, 4, 80)
    rows = [f"{e},{o},{rng.normal():.3f}\n" for e, o in zip(euros, other, strict=True)]
    Path("t.csv").write_text("eur,usd,x\n" + "".join(rows))
    data = set_up(Table("t.csv", label_columns=["eur"]), task=Regression(100, 20), validation=0, num_labels=10)
    assert any("usd decides the label" in warning for warning in data.reading.warnings) == named


def test_a_class_that_no_sample_is_without_is_named() -> None:
    present = np.random.default_rng(0).integers(0, 2, (90, 3))
    present[:, 0] |= present.sum(1) == 0
    for labels, named in ((present, False), (2 * present - 1, True)):
        data = set_up(arrays(train_labels=labels, test_labels=labels[:30]), task=MultiLabel())
        assert any("no training sample is without the class '0'" in text for text in data.reading.warnings) == named


@pytest.mark.parametrize("kind", ["0..1", "0..255", "int64", "uint16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_pixels_whatever_their_type(kind: str, channels: int) -> None:
    pixels = torch.randint(0, 256, (30, channels, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    images = {"0..1": pixels / 255, "0..255": pixels.float(), "int64": pixels.long(),
              "uint16": (pixels.int() * 257).to(torch.uint16)}[kind]  # fmt: skip
    part = (images, torch.arange(30) % 3)
    data = FederatedDataModule.from_datasets(part, part, weak="crop", strong="fixmatch", num_clients=2, num_labels=6)
    data.setup()
    assert torch.equal(data.test_images, pixels)
    with pytest.raises(ValueError, match="has no usual views"):
        FederatedDataModule.from_datasets((images.float() - 1, part[1]), part)


@pytest.mark.parametrize("scale", [1, 0.01])
def test_faint_numbers_beside_a_peak_stay_numbers(scale: float) -> None:
    values = scale * torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    values[:, 0, 0, 0] = 1
    part = TensorDataset(values, torch.arange(30) % 3)
    assert Datasets(part, part).load().spec.pixels == (scale == 1)


@pytest.mark.parametrize("unit", [1, 1000])
def test_features_that_are_mostly_zero_are_compared_by_all_values(unit: int) -> None:
    train, test = np.random.default_rng(0).normal(size=(2, 90, 5))
    train[:, 0] = [0] * 85 + [0.01, 7, 7, 7, 7]
    test[:, 0] = [0] * 84 + [7 * unit] * 6
    warnings = set_up(arrays(train=train, test=test, test_labels=LABELS)).reading.warnings
    assert any("far outside" in warning for warning in warnings) == (unit > 1)


def test_rows_of_a_rare_class_may_stand_several_times() -> None:
    train = np.random.default_rng(0).normal(size=(62, 5)).repeat([1] * 48 + [3] * 14, axis=0)
    labels = np.arange(90) // 48
    warnings = set_up(arrays(train=train, train_labels=labels, test_labels=labels[-60::2])).reading.warnings
    assert not any("decides the label" in warning for warning in warnings)


@pytest.mark.parametrize("kind", [">f4", ">f8", "reversed"])
def test_arrays_of_other_machines_and_views_are_read(kind: str) -> None:
    values = np.arange(450).reshape(90, 5)
    given = values[::-1] if kind == "reversed" else values.astype(kind)
    pair: Any = (given, LABELS.astype(">i8"))
    loaded = FederatedDataModule.from_datasets(pair, pair, weak="none", strong="none").source.load()  # type: ignore[union-attr]
    assert np.array_equal(loaded.train.images.numpy(), given)
    assert loaded.train.labels.tolist() == LABELS.tolist()


def test_samples_without_a_label_count_in_the_normalisation() -> None:
    path = arrays(unlabeled=np.full((90, 5), 10.0))
    assert set_up(path).spec.mean[0] == pytest.approx(5, abs=0.2)


def test_labels_of_the_server_need_no_client(tmp_path: Path) -> None:
    path = arrays(unlabeled=np.zeros((4, 5)), unlabeled_client_ids=["n", "s", "n", "s"])
    with np.load(path) as file:
        given: dict[str, Any] = {
            "unlabeled": (file["unlabeled"],),
            "unlabeled_client_ids": file["unlabeled_client_ids"],
        }
        pair, test = (file["train"], file["train_labels"]), (file["test"], file["test_labels"])
    data = FederatedDataModule.from_datasets(pair, test, **given, weak="none", strong="none", num_labels="all")
    data.setup()
    assert data.client_names == ("n", "s")
    assert data.local_data(1, 1).unlabeled.tolist() == [91, 93]
    data.num_labels = 9
    with pytest.raises(ValueError, match="labelled samples have no client"):
        data.setup()


class Given(Dataset[Any]):
    def __init__(self, item: Callable[[int], Any], classes: list[str] | None = None) -> None:
        self.item = item
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def image(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def rarely_random(index: int) -> Any:
    return (torch.ones(5) if torch.rand(()) < 1e-9 else torch.zeros(5)), index % 2


BAD: list[tuple[Callable[[int], Any], str]] = [
    (lambda i: (Image.new("L", (8, 8)), i % 2), r"train\[0\] is Image, no tensor; .*pil_to_tensor"),
    (lambda i: (image(3, 8, 8), "nevus"), "has the label 'nevus'"),
    (lambda i: (torch.ones(5), torch.eye(3)[i % 3]), r"of one-hot labels labels.argmax\(1\)"),
    (lambda i: (image(3, 8, 8), 0, "path"), "got 3 values"),
    (lambda i: (float(i), i % 2), "where a sample is one number"),
    (lambda i: (torch.ones(5, dtype=torch.complex64), i % 2), "give real numbers"),
    (lambda i: (torch.ones(5), 0.5), "0.5 is not a label"),
    (lambda i: {"x": torch.ones(5), "y": 0}, "rows with named columns are wrapped in Columns"),
    (lambda i: (torch.ones(3 - i % 2), i % 2), r"sample 0 is \(3,\) torch.float32, sample 1 \(2,\)"),
    (rarely_random, "train draws random numbers"),
    (lambda i: (torch.full((5,), np.random.default_rng().random()), i % 2), "differs between two readings"),
    (lambda i: (torch.tensor([1, np.nan if i == 7 else 1.0]), i % 2), r"train: 1 of 40 .*\(the first is sample 7\)"),
    *((lambda i, dtype=dtype: (image(24, 20, 3, dtype=dtype), i % 2), "where channels come last")
      for dtype in (torch.uint8, torch.uint16, torch.float32, torch.float64)),
]  # fmt: skip


@pytest.mark.parametrize(("item", "message"), BAD)
def test_items_of_other_kinds_are_refused_with_the_remedy(item: Callable[[int], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"data.dataset: .*{message}"):
        Datasets(Given(item), samples((5,))).load()


def test_tensors_beside_samples_and_labels_are_refused() -> None:
    labels = torch.arange(40) % 2
    with pytest.raises(ValueError, match=r"data.dataset: train\[0\] .*got 3 values"):
        Datasets(TensorDataset(torch.ones(40, 5), labels, 1 - labels), samples((5,))).load()


@pytest.mark.parametrize(
    ("shape", "named"),
    [((8, 8), True), ((128, 9), True), ((12, 12, 5), True), ((9, 128), False), ((64, 7, 7), False), ((5, 5), False)],
)
def test_samples_that_may_be_in_another_layout_are_named(shape: tuple[int, ...], named: bool) -> None:
    source = Datasets(samples(shape), samples(shape))
    source.load()
    assert any(f"have {shape[0]} channels" in warning for warning in source.reading.warnings) == named


@pytest.mark.parametrize(("brightest", "named"), [(15, True), (255, False)])
def test_images_of_few_bits_are_named(brightest: int, named: bool) -> None:
    images = torch.randint(brightest + 1, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    part = TensorDataset(images, torch.arange(40) % 2)
    warnings = set_up(Datasets(part, part), validation=0).reading.warnings
    assert any("no pixel is above 63" in warning for warning in warnings) == named


def test_a_data_set_that_seeds_its_draws_is_read() -> None:
    def seeded(index: int) -> Any:
        torch.manual_seed(index)
        return torch.rand(5), index % 2

    assert len(Datasets(Given(seeded), samples((5,))).load().train.labels) == 40


@pytest.mark.parametrize(
    ("train", "test", "fits"),
    [
        (["dog", "emu"], ["cat", "dog"], False),
        (["dog", "emu"], ["emu", "dog"], False),
        (["dog", "emu"], ["emu"], False),
        (["dog", "emu"], ["dog"], True),
        (["dog", "emu"], None, True),
    ],
)
def test_data_sets_must_number_the_same_classes(train: list[str], test: list[str] | None, fits: bool) -> None:
    first, second = Given(lambda i: (torch.zeros(5), i % 2), train), Given(lambda i: (torch.zeros(5), 0), test)
    source = Datasets(ConcatDataset([Subset(first, range(40))]), second)
    if fits:
        assert source.load().spec.class_names == tuple(train)
    else:
        with pytest.raises(ValueError, match=r"classes of test are .*, and those of train dog, emu"):
            source.load()
        with pytest.raises(ValueError, match=r"classes of train are .* every part of a ConcatDataset"):
            Datasets(ConcatDataset([first, Subset(second, range(2))]), first).load()


# Folders


def photos(*more: str) -> str:
    """Folders of eight classes' images in all, and further files; images if their ending is that of one."""
    files = [f"photos/{p}/{c}/{n}.png" for p, c in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "b"))
             for n in range(4)]  # fmt: skip
    for number, file in enumerate([*files, *(f"photos/{name}" for name in more)]):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        if file.lower().endswith(("png", "jpg")):
            Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)).save(file)
        else:
            Path(file).write_bytes(b"\0")
    return "photos"


def unlabeled(root: str) -> int:
    return len(ImageFolder(root, 8).list_images().get("unlabeled", []))


@pytest.mark.parametrize(
    ("files", "found", "line"),
    [
        (["unlabeled/0.jpg", *(f"unlabeled/{n}.HEIC" for n in range(20))], 1, "left out: .heic (20); convert images"),
        (["unlabeled/0.jpg", "unlabeled/1.dcm", "unlabeled/IM0"], 1, "left out: .dcm (1), no ending (1)"),
        (["unlabeled/0.jpg", "unlabeled/@eaDir/0.jpg"], 1, "left out: @eaDir/ (1)"),
        (["unlabeled/0.jpg", "unlabeled/sub/__MACOSX/0.jpg"], 1, "left out: __MACOSX/ (1)"),
        (["unlabeled/0.jpg", "unlabeled/0_thumb.jpg"], 1, "left out: thumbnails (1)"),
        (["train/0.png"], 0, "left out: files *.png beside class folders (1)"),
        (["train/@eaDir/a/0.png"], 0, "left out: @eaDir/ (1)"),
        (["unlabeled/0.jpg", "unlabeled/thumbs/0.jpg"], 1, "left out: thumbs/ (1)"),
        (["masks/0.png"], 0, "left out: masks/ (1)"),
    ],
)
def test_what_a_phone_and_a_disk_add_is_left_out_with_a_word(
    files: list[str], found: int, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = photos(*files)
    data = set_up(ImageFolder(root, 8), validation=0)
    assert (unlabeled(root), data.class_names) == (found, ("a", "b"))
    assert f"! photos; {line}" in data.reading.summary()
    assert ("convert images" in data.reading.summary()) == ("left out: ." in line)
    assert [record.levelname for record in caplog.records if line in record.message] == ["WARNING"]


def test_classes_may_be_named_as_thumbnails_are() -> None:
    names = ("fist", "left_thumb", "thumbs")
    root = photos(*(f"{part}/{name}/{k}.png" for part in ("train", "test") for name in names for k in range(3)))
    assert ImageFolder(root, 8).describe().class_names == ("a", "b", *names)


def test_names_of_macos_are_those_of_others() -> None:
    data = set_up(ImageFolder(photos("train/\u00e4/0.png", "test/a\u0308/1.png"), 8), validation=0)
    assert data.class_names == ("a", "b", "\u00e4")


def test_system_files_and_hidden_files_are_not_spoken_of() -> None:
    root = photos("unlabeled/0.png", "unlabeled/Thumbs.db", "train/desktop.ini", "unlabeled/.DS_Store")
    assert set_up(ImageFolder(root, 8), validation=0).reading.warnings == []


@pytest.mark.parametrize("target", ["..", ".", "../..", "sub"])
def test_a_link_to_a_folder_above_or_read_already_is_left_out(target: str) -> None:
    root = photos("unlabeled/0.png", "unlabeled/1.png", "unlabeled/sub/2.png")
    os.symlink(target, f"{root}/unlabeled/loop")
    os.symlink("../../train", f"{root}/unlabeled/sub/other")
    os.symlink("..", f"{root}/train/loop")
    assert unlabeled(root) == 3 + 8
    assert ImageFolder(root, 8).describe().class_names == ("a", "b")


@pytest.mark.parametrize(
    ("made", "root", "message"),
    [
        ([], "nowhere", "'nowhere', which does not exist"),
        (["photos.zip"], "photos/photos.zip", "which is a file: unpack it"),
        ([], ".", r"'.', which holds photos; try 'photos'"),
        ([], "photos/train", r"'photos/train', which holds a, b"),
        (["train/c/0.dcm"], "photos", r"train/c' holds no image file; .*left out: .dcm \(1\); .*pydicom"),
    ],
)
def test_a_wrong_folder_is_described(made: list[str], root: str, message: str) -> None:
    photos(*made)
    with pytest.raises(FileNotFoundError, match=message):
        ImageFolder(root, 8).load()


def test_sites_leave_out_what_folders_leave_out_and_hidden_ones() -> None:
    photos("train/@eaDir/a/0.png", "train/.hidden/0.png", ".Trash/a/0.png", "train/a/0.heic", "train/0.heic",
           *(f"{site}/{c}/4.png" for site in ("train", "test") for c in "ab"))  # fmt: skip
    source = SiteFolders("photos", 8)
    assert (source.describe().client_names, source.describe().class_names) == (("test", "train"), ("a", "b"))
    assert "@eaDir/ (1)" in source.reading.warnings[0]


@pytest.mark.parametrize("word", ["NA", "None", "?", "-1", ""])
def test_images_without_a_label_go_to_the_clients(word: str) -> None:
    root = photos("new/0.png", "new/1.png")
    lines = [f"{part}/{c}/{n}.png,{c},{'val' if n == 3 else part}" for part in ("train", "test") for c in "ab"
             for n in range(4)]  # fmt: skip
    Path(root, "t.csv").write_text("\n".join(["file,label,split", *lines, f"new/0.png,{word},train", ",,"]) + "\n")
    data = set_up(ImageTable(f"{root}/t.csv", 8))
    assert data.class_names == ("a", "b")
    text = "\n".join(data.reading.lines())
    assert "a 3/2/3, b 3/2/3 (training/validation/test); 1 training image without a label" in text
    assert (f"training images without a label (1 in all): {word!r} of '0.png'" in text) == bool(word)


def test_the_same_picture_in_training_and_test_is_named() -> None:
    root = photos("train/a/new.png")
    for copy in ("test/b/copy.png", "train/b/copy.png"):
        Path(root, copy).write_bytes(Path(root, "train/a/new.png").read_bytes())
    text = set_up(ImageFolder(root, 8), validation=0).reading.summary()
    assert "! 1 of 9 test samples have the content of a training sample (the first is 'test/b/copy.png')" in text
    assert "! 'train/a/new.png' and 'train/b/copy.png' are the same with different labels" in text


def test_folders_of_parts_are_spelled_as_people_do() -> None:
    root = photos("Train/a/new.png", "unlabelled/0.png", "val/b/0.png")
    text = set_up(ImageFolder(root, 8)).reading.facts["classes"]
    assert text == "a 5/0/4, b 4/1/4 (training/validation/test); 1 training image without a label"


def test_files_that_may_be_taken_for_something_else_are_named() -> None:
    root = Path(photos("train/a/0_mask.png"))
    page = Image.new("L", (8, 8))
    page.save(root / "train/b/scan.tif", save_all=True, append_images=[page])
    os.symlink("test", root / "val")
    found = set_up(ImageFolder(root, 8), validation=0).reading.warnings
    assert [text[:26] for text in found] == [
        "photos; left out: links to", "files are named as masks o", "files have several pages, "
    ]  # fmt: skip
    few = SiteFolders(str(root), 8)
    few.list_images()
    assert "folders with less than 5 images have no test image (2 in all" in few.reading.warnings[-1]


# The report


def test_a_report_has_eight_lines_and_the_run_folder_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reading = Reading()
    reading.facts = {f"topic {n}": "fact" for n in range(3)}
    for n in [*range(9), 0]:
        reading.warn(f"warning {n}")
    data = set_up("digits", num_labels=10)
    first = data.reading.facts
    data.reading.facts = {"columns": "x", "data": "of another setup"}
    data.reading.inspect(data.spec, data._train, data._test)
    assert data.reading.facts == first | {"columns": "x"}
    data.reading = reading
    trainer: Any = SimpleNamespace(
        datamodule=data, is_global_zero=True, log_dir=str(tmp_path), loggers=[], enable_progress_bar=True, print=print
    )
    algorithm: Any = None
    RoundProgress().on_fit_start(trainer, algorithm)
    printed = capsys.readouterr().out.splitlines()
    assert printed[6:8] == ["! warning 3", "! more warnings (5): see the log, or data.txt of a run"]
    written = (tmp_path / "data.txt").read_text()
    assert written.count("! warning") == 9
    assert data.statistics.summary() in written
