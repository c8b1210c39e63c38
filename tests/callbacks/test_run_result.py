from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.callbacks.run_result import _write, summarize_run
from lightning_fedssl.storage.files import as_json
from lightning_fedssl.trainer import FederatedTrainer
from tests.toy import ToyData, toy_semifl, toy_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    """SemiFL after two rounds."""
    trainer = toy_trainer(tmp_path_factory.mktemp("run"), max_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    return trainer


def test_the_result_file_holds_what_the_run_logged(trained: FederatedTrainer) -> None:
    result = json.loads(Path(str(trained.log_dir), "result.json").read_text())
    assert result["metrics"]["test/accuracy"] == float(trained.callback_metrics["test/accuracy"])
    assert (result["command"], result["method"], result["round"]) == ("fit", "SemiFL", 2)
    assert result["partition"] == trained.datamodule.split.hash
    assert not result["interrupted"]


def test_a_number_that_json_does_not_have_is_null(trained: FederatedTrainer) -> None:
    """Python writes NaN without quotes, which other programs refuse."""
    result = summarize_run(trained, trained.algorithm, {"val/loss": float("nan"), "val/accuracy": 0.5})
    assert json.loads(as_json(result), parse_constant=pytest.fail)["metrics"] == {"val/accuracy": 0.5, "val/loss": None}
    assert as_json([(1, float("inf")), {"a": "b"}]) == '[[1, null], {"a": "b"}]'


def test_the_result_is_replaced_in_one_step(trained: FederatedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(trained.log_dir), "result.json")
    path.write_text("before")
    replaced = list[Any]()
    monkeypatch.setattr(os, "replace", lambda new, old: replaced.append(old))  # as if killed before it
    _write(trained, trained.algorithm)
    assert (path.read_text(), Path(*replaced)) == ("before", path)
