"""Tables with numeric and categorical columns."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.data import FederatedDataModule, NaturalClients, Table
from lightning_fedssl.models import MLP
from lightning_fedssl.task import Regression
from tests.data.helpers import set_up
from tests.toy import toy_trainer


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """Ages 0 to 39, of which row 1 lacks one; rows 30 to 39 have no label; row 38 has a stage that no other has."""
    rows = ["age,stage,clinic,outcome"]
    for row in range(40):
        stage = "III" if row == 38 else ("I", "II")[row % 2]
        rows.append(f"{row if row != 1 else ''},{stage},c{row % 4},{'' if row >= 30 else ('ill', 'well')[row // 15]}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_columns_become_numbers_and_rows_without_a_label_go_to_clients(patients: Path, tmp_path: Path) -> None:
    table = Table(str(patients), "outcome", client_column="clinic")
    data = set_up(table, num_clients=4, partition=NaturalClients(), validation=0)
    assert (data.class_names, data.client_names) == (("ill", "well"), ("c0", "c1", "c2", "c3"))
    images, labels = data.local_data(0, 1).images, data.true_labels(torch.arange(34))
    assert labels.tolist() == [0] * 12 + [1] * 12 + [-1] * 10  # of each class, each fifth row is a test row
    assert images.shape == (34, 4)
    assert images[0].tolist() == [0, 1, 0, 0]
    tested = {4, 9, 14, 19, 24, 29}
    known = sorted(row for row in range(40) if row not in tested and row != 1)
    assert images[1].tolist() == [float(torch.tensor(known).double().quantile(0.5)), 0, 1, 0]
    assert images[32].tolist() == [38, 0, 0, 1]
    assert data.client_test_indices(0).tolist() == [0, 4]  # type: ignore[union-attr]
    toy_trainer(tmp_path / "run", max_rounds=1).fit(SemiFL(network=partial(MLP, hidden=(4,)), server_epochs=1), data)


def test_columns_can_be_chosen_and_other_categories_of_test_rows_are_zeros(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("code,size,label,part\n1,2,a,train\n2,3,b,train\n3,4,a,test\n1,,b,validation\n")
    loaded = Table(str(path), split_column="part", categorical=["code"]).load()
    assert loaded.train.images.tolist() == [[2, 1, 0], [3, 0, 1]]
    assert loaded.test.images.tolist() == [[4, 0, 0]]
    assert loaded.validation is not None
    assert loaded.validation.images.tolist() == [[2.5, 1, 0]]
    assert Table(str(path), split_column="part", numeric=["size"], categorical=[]).load().spec.in_shape == (1,)


def test_an_existing_csv_file_is_a_table(patients: Path) -> None:
    with pytest.raises(ValueError, match="has no column 'label'; there are age, stage, clinic, outcome"):
        FederatedDataModule(str(patients), weak="none", strong="none")
    patients.write_text(patients.read_text().replace("outcome", "label"))
    assert set_up(str(patients)).in_shape == (1 + 3 + 4,)


def test_spreadsheets_with_semicolons_have_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("width;label\n" + "".join(f"-{k},5;a, b\n{k},5;c\n" for k in range(10)))
    spec, train, test, _ = Table(str(path)).load()
    assert spec.class_names == ("a, b", "c")
    assert sorted(torch.cat([train.images, test.images]).flatten().tolist())[:2] == [-9.5, -8.5]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        ("1.150 900,5 -2.345.678", [1150, 900.5, -2345678]),
        ("1.150,25 900", [1150.25, 900]),
        ("1.150 0.5 900,5", [1.15, 0.5, 900.5]),  # dots are decimal, too
        ("1.150 900", [1.15, 900]),  # which a warning names
        ("192.168.100.200 1,5 2,5 3,5 5,5", [2.5, 1.5, 2.5, 3.5]),  # an address, which a warning names
    ],
)
def test_dots_beside_decimal_commas_separate_thousands(tmp_path: Path, cells: str, numbers: list[float]) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{cell};{label}\n" for label in "ab" for cell in (cells.split() * 5)[:5]]
    path.write_text("y;label\n" + "".join(rows))
    _, train, _, _ = Table(str(path)).load()
    assert train.images.flatten()[: len(numbers)].tolist() == pytest.approx(numbers)


@pytest.mark.parametrize(("different", "split"), [(20, None), (20, "part"), (3, None)])
def test_numbers_to_predict_that_are_given_as_classes_name_the_right_key(
    tmp_path: Path, different: int, split: str | None
) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{row},{row % different}.5,{('test', 'train')[row % 2] if split else row}\n" for row in range(20)]
    path.write_text("x,y,part\n" + "".join(rows))
    with pytest.raises(ValueError, match="label_columns"):
        set_up(Table(str(path), label_column="y", split_column=split), task=Regression())


def test_a_number_to_predict_that_may_stand_for_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{row % 7},{-99 if row == 4 else row}\n" for row in range(20)))
    assert "y: cells like '-99' in row 6" in Table(str(path), label_columns=["y"]).reading.warnings[0]
