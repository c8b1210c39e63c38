from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl import Experiment
from lightning_fedssl.cli import entry
from lightning_fedssl.data import Table
from lightning_fedssl.data.class_shares import drawn_to
from lightning_fedssl.data.table_rows import encode_rows
from lightning_fedssl.export import load_network

ALONE = """
import csv, json, torch
model, told = torch.export.load("out/model.pt2").module(), json.load(open("out/model.json"))
cell = lambda r, i: float(r[i["column"]] or i["fill"]) if "fill" in i else float(r[i["column"]] == i["level"])
x = torch.tensor([[cell(row, i) for i in told["inputs"]] for row in csv.DictReader(open("new.csv"))])
print(json.dumps([told["class_names"][k] for k in model(x).argmax(1)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with gaps, words, decimal commas and a column of sites, and new rows."""
    folder = tmp_path_factory.mktemp("table")
    lines = ["age;weight;sex;ward;outcome;site"]
    for k in range(80):
        weight = "" if k % 9 == 0 else f"{50 + k % 2 * 20 + k % 7},{k % 10}"
        label = ("well", "ill")[k % 2] if k < 30 or k % 5 == 0 else ""
        lines.append(f"{20 + k % 40};{weight};{'fm'[k % 3 == 0]};w{k % 4};{label};s{k % 3}")
    (folder / "data.csv").write_text("\n".join(lines))
    new = ["sex,ward,weight,age", "f,w1,72.5,41", "m,w0,,33", "f,w3,53.0,", "m,w2,51.2,28"]
    (folder / "new.csv").write_text("\n".join(new))
    keys = {
        "data.dataset": "Table", "data.dataset.csv_file": str(folder / "data.csv"), "data.num_clients": 3,
        "data.dataset.label_column": "outcome", "data.dataset.client_column": "site", "data.num_labels": "all",
        "trainer.default_root_dir": str(folder / "run"), "trainer.max_rounds": 2, "trainer.enable_progress_bar": False,
        "trainer.devices": 1,
    }  # fmt: skip
    trainer, model, data = Experiment.from_config("presets/table.yaml", keys)
    trainer.fit(model, data)
    command = ["export", "--default_root_dir", str(folder / "run"), "--output", str(folder / "out")]
    for form in ("safetensors", "torch_export"):
        assert entry.main([*command, "--format", form]) == 0
    return folder


def test_new_rows_of_a_file_a_frame_and_mappings_are_predicted_alike(folder: Path) -> None:
    pandas: Any = pytest.importorskip("pandas")
    model = load_network(folder / "out")
    with (folder / "new.csv").open() as file:
        rows: list[dict[str, Any]] = [*csv.DictReader(file)]
    found = model.predict(folder / "new.csv")
    assert found == model.predict(rows) == model.predict(pandas.read_csv(folder / "new.csv"))
    assert [max(row, key=row.__getitem__) for row in found][::3] == ["ill", "well"]
    assert all(abs(sum(row.values()) - 1) < 1e-6 for row in found)
    median = next(each["fill"] for each in model.description["inputs"] if each["column"] == "age")
    assert model.predict([{**rows[2], "age": median}])[0] == pytest.approx(found[2], abs=1e-6)
    with pytest.raises(ValueError, match="no column 'weight'"):
        model.predict([{"age": 3, "sex": "f", "ward": "w1"}])


def test_a_training_row_is_encoded_as_in_training(folder: Path) -> None:
    source = Table(str(folder / "data.csv"), "outcome", client_column="site")
    with (folder / "data.csv").open() as file:
        rows = [*csv.DictReader(file, delimiter=";")]
    tested = [{**row, "weight": row["weight"].replace(",", ".")} for row in rows]
    both = torch.cat([source.load().train.images, source.load().test.images])
    assert sorted(encode_rows(tested, source.inputs).float().tolist()) == sorted(both.tolist())


def test_predict_needs_the_checkpoint_alone(folder: Path) -> None:
    (folder / "data.csv").rename(folder / "gone.csv")
    try:
        out = folder / "predictions.csv"
        command = ["predict", "--rows", str(folder / "new.csv"), "--output", str(out)]
        assert entry.main([*command, "--default_root_dir", str(folder / "run")]) == 0
    finally:
        (folder / "gone.csv").rename(folder / "data.csv")
    with out.open() as file:
        rows = [*csv.DictReader(file)]
    found = load_network(folder / "out").predict(folder / "new.csv")
    assert [row["class_name"] for row in rows] == [max(row, key=row.__getitem__) for row in found]


def test_new_rows_are_drawn_to_the_shares_of_their_site(folder: Path) -> None:
    found = []
    for share in (0.1, 0.9):
        command = ["predict", "--rows", str(folder / "new.csv"), "--output", str(folder / f"{share}.csv")]
        entry.main([*command, "--default_root_dir", str(folder / "run"), "--class_shares.ill", str(share)])
        with (folder / f"{share}.csv").open() as file:
            found.append([float(row["probability_ill"]) for row in csv.DictReader(file)])
    assert all(few < many for few, many in zip(*found, strict=True))
    one = drawn_to(torch.tensor([[0.9, 0.1]]), {"ill": 0.1, "well": 0.9}, ["ill", "well"], one_class=True)
    assert float(one[0, 0].logit()) == pytest.approx(10 / 11 * 2.19722 - 1 / 11 * 2.19722, abs=1e-4)
    with pytest.raises(ValueError, match="one class each"):
        drawn_to(torch.tensor([[0.9, 0.1]]), {"ill": 0.1}, ["ill", "well"], one_class=False)


def test_five_lines_of_torch_and_json_give_the_same_classes(folder: Path) -> None:
    code = f"import sys\nsys.modules['lightning_fedssl'] = None{ALONE}"
    told = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    found = load_network(folder / "out").predict(folder / "new.csv")
    assert json.loads(told) == [max(row, key=row.__getitem__) for row in found]
