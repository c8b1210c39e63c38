"""Every kind of row of the papers' tables is a configuration that can be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl import Experiment


@pytest.fixture
def papers(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    return script


@pytest.mark.parametrize(
    ("table", "name", "method"),
    [
        ("fed_shvr", "fedshvr 0.75 0.1", "FedSHVR"),
        ("fed_shvr", "fedavg 600", "FedAvg"),
        ("readings", "fedshvr 0.75 0", "FedSHVR"),
        ("next", "FixMatch-GPL (received model's labels)", "ProxyFL"),
        ("next", "FedAvg + FixMatch (Table 2)", "SemiFL"),
        ("fedrgd", "norm, ResNet", "FedRGD"),
        ("fedrgd", "half, 100 labels", "FedRGD"),
        ("semi_sfl", "Semi-SFL, adaptive K_s", "SemiSFL"),
        ("semi_sfl", "SemiFL, larger K_s", "SemiFL"),
    ],
)
def test_a_row_is_a_run(papers: Any, table: str, name: str, method: str) -> None:
    cells, column, _, _ = papers.TABLES[table]
    cell = next(cell for cell in cells({}) if cell.key[column] == name)
    trainer, model, _ = Experiment.from_config(*cell.configurations, {"trainer.max_rounds": 7})
    assert type(model).__name__ == method
    assert trainer.max_rounds == 7


def test_a_row_that_is_thereis_known_and_a_file_keeps_its_columns(papers: Any) -> None:
    path = Path("a.csv")
    papers.append(path, {"cell": "x", "seed": "0", "accuracy": "0.5"})
    papers.append(path, {"cell": "x", "seed": "1", "accuracy": "0.6", "loss": "1"})
    assert path.read_text() == "cell,seed,accuracy\nx,0,0.5\nx,1,0.6\n"
    assert papers.is_known(path, {"cell": "x", "seed": "1", "rounds": "3"})  # a column that the file does not have
    assert not papers.is_known(path, {"cell": "x", "seed": "2"})


def test_a_run_whose_time_is_up_resumes_and_writes_its_rows_as_they_come(
    papers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = {"trainer.max_rounds": 3, "data.max_train_images": 300, "trainer.check_val_every_n_rounds": 1}
    cell = papers.Cell({"label": "digits"}, ["semifl_digits.yaml", {**small, "data.validation": "test"}])
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    monkeypatch.setitem(papers.TABLES, "next", (lambda settings: [cell], "label", "next.csv", 100))
    monkeypatch.setattr("sys.argv", ["papers.py", "next", "--seeds", "0", "1", "--minutes", "0"])
    for stops in range(4):
        papers.main()
        seeds_and_rounds = [line.split(",")[2:4] for line in (tmp_path / "curves.csv").read_text().splitlines()[1:]]
        assert seeds_and_rounds == [["0", "1"], ["0", "2"], ["0", "3"], ["1", "1"]][: stops + 1]
        assert (tmp_path / "next.csv").exists() == (stops >= 2)
    assert (tmp_path / "next.csv").read_text().splitlines()[1].startswith("digits,0,")
