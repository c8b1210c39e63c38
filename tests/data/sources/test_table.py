"""Tables with numeric and categorical columns."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.data import FederatedDataModule, NaturalClients, Table
from lightning_fedssl.models import MLP
from tests.toy import toy_trainer


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


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
    data = FederatedDataModule(
        table, weak="none", strong="none", num_clients=4, num_labels=4, partition=NaturalClients(), validation=0
    )
    data.setup()
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


def test_usual_words_for_a_missing_number_are_empty(tmp_path: Path) -> None:
    rows = "".join(f"{word},a,train\n" for word in ("1", "NA", "N/A", "null", "None", "nan", "", "3"))
    (tmp_path / "t.csv").write_text(f"x, label, part\n{rows}2,a,test\n4,b,train\n")
    loaded = Table(str(tmp_path / "t.csv"), split_column="part").load()
    assert loaded.train.images.flatten().tolist() == [1, *[3] * 7, 4]


def test_an_existing_csv_file_is_a_table(patients: Path) -> None:
    with pytest.raises(ValueError, match="has no column 'label'; there are age, stage, clinic, outcome"):
        FederatedDataModule(str(patients), weak="none", strong="none")
    patients.write_text(patients.read_text().replace("outcome", "label"))
    data = FederatedDataModule(str(patients), weak="none", strong="none", num_clients=2, num_labels=4)
    assert data.in_shape == (1 + 3 + 4,)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("x,label\n1,a\n", {}, "needs rows of train and of test"),
        ("x,label,s\n1,a,train\n1,b,tset\n", {"split_column": "s"}, "there are train, tset"),
        ("x,label\n" + "high,a\n" * 9, {"numeric": ["x"]}, "x: 9 of 9 cells are no numbers: 'high' in row 2"),
        ("x,label,c\n" + "1,a,k\n1,b,\n" * 9, {"client_column": "c"}, "row 3: a row of train needs a value of c"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=f"data.dataset: .*{message}"):
        Table(str(tmp_path / "t.csv"), **settings).load()
