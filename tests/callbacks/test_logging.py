from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tqdm import tqdm

from lightning_fedssl.callbacks import LabelsAlone, logging
from lightning_fedssl.callbacks.logging import LINE, fitting, result_parts, round_parts
from tests.toy import ToyData, toy_semifl, toy_trainer


def test_parts_of_a_round() -> None:
    metrics = {"val/accuracy": 0.75, "client/loss": 1.5, "lr": 0.1, "client/mask_rate": 0.5}
    missing = {"client/selected": 10.0, "client/finished": 7.0, "client/dropped": 3.0}
    assert round_parts(metrics | missing, 4) == [
        "7 of 10 clients took part", "3 dropped out", "val 3 of 4", "client loss 1.500", "mask rate 50%",
    ]  # fmt: skip
    assert round_parts(metrics, 1000)[0] == "val 75.0%"
    assert round_parts({"val_mse": 0.25}, 0) == ["val_mse 0.25"]
    assert fitting(["val 75.0%", "a long part", "short"], 20) == "val 75.0%  short"


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (0, "test accuracy 80.00%"),
        (355, "test accuracy 80.00% (284 of 355 samples, standard error 8 samples)"),
    ],
)
def test_a_result_has_its_standard_error_in_samples(samples: int, expected: str) -> None:
    assert result_parts({"test/accuracy": 0.8}, "test", samples) == [expected]


@pytest.mark.parametrize("progress", [True, False])
def test_the_result_is_printed_with_and_without_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: bool
) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=2, enable_progress_bar=progress)
    trainer.fit(toy_semifl(), ToyData(validation=0.1 if progress else 0))
    lines = capsys.readouterr().out.splitlines()
    rounds = [line for line in lines if line.startswith("round")]
    assert [re.sub(r"  .* \d\d:\d\d", r" ... 00:00", line) for line in rounds] == (
        ["round 1/2 ... 00:00 left", "round 2/2 ... 00:00 left"] if progress else []
    )
    assert max(map(len, rounds), default=0) <= LINE
    assert re.match(r"after round 2: test accuracy .*standard error \d+", lines[-3])
    assert lines[-2] == f"run folder: {trainer.log_dir}"
    name = "best" if progress else "last"  # without validation there is no best round
    assert lines[-1] == f"next: lightning-fedssl export --ckpt_path {trainer.log_dir}/checkpoints/{name}.ckpt"


def test_without_validation_each_tenth_round_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=25, enable_progress_bar=True, logger=False)
    trainer.fit(toy_semifl(), ToyData(validation=0))
    rounds = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert rounds == [*(f"{number}/25" for number in range(2, 26, 2)), "25/25"]


def test_the_time_left_grows_with_the_rounds() -> None:
    progress, trainer, said = logging.RoundProgress(), mock.MagicMock(cohort=[], max_rounds=10), list[str]()
    for trainer.round_index, seconds in enumerate((1, 2, 4, 4, 4, 4, 4), 1):
        progress.on_round_end(trainer, mock.Mock(), {"time/round_s": seconds})
        said.append(progress._left)
    assert [*said[1:4], said[6]] == ["at least 00:08", "at least 00:14", "at least 00:24", "00:12"]


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


class Eager(tqdm):  # type: ignore[misc]
    """A bar that is painted at each change."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**{**keys, "mininterval": 0})


def test_a_notebook_gets_a_line_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    toy_trainer(tmp_path, max_rounds=2, enable_progress_bar=True).fit(toy_semifl(), ToyData())
    shown = re.split("[\r\n]+", terminal.getvalue())
    assert [line.split()[1] for line in shown if "round " in line and "left" in line] == ["1/2", "2/2"]


def test_a_terminal_shows_a_bar_also_of_the_labels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setattr(logging, "tqdm", Eager)
    monkeypatch.setenv("COLUMNS", "100")
    trainer = toy_trainer(
        tmp_path, max_rounds=2, clients_per_round=3, callbacks=LabelsAlone(), enable_progress_bar=True
    )
    trainer.fit(toy_semifl(), ToyData())
    shown = re.split("[\r\n]+", terminal.getvalue())
    for expected in (r"\| round 1/2  client 3/3 +\? left", r"\| round 2/2  val .*left", r"\| labels alone  round 2/2 "):
        assert any(re.search(expected, line) for line in shown), expected
    assert not any(line.startswith("round") for line in shown)
    assert shown[-2].startswith("next: ")
