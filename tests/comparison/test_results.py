from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_fedssl.comparison.results import are_whole, curve, is_finished, rounds, summary
from lightning_fedssl.task import Classification


def test_rows_of_resumed_runs_are_merged_and_torn_ones_left_out(tmp_path: Path) -> None:
    first, second = (tmp_path / "lightning_logs" / name for name in ("version_9", "version_10"))
    for folder, text in ((first, "step,a,b\n1,0.5,\n2,0.25,1\n3,0."), (second, "step,a,c\n2,0.75,4\n3,x,\n")):
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(text)
    assert rounds(tmp_path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.75, "b": 1, "c": 4}]
    assert rounds(tmp_path / "nothing") == []


@pytest.mark.parametrize("torn", [b"2,0.9", b'2,"0.', b"2,\xff\xfe\n", b"\0\0\0", b"nan,1,1\n", b"1e999,1,1\n"])
def test_a_torn_row_is_left_out(tmp_path: Path, torn: bytes) -> None:
    """A number may be cut and still be one."""
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_bytes(b"step,test/accuracy,val/accuracy\r\n1,0.5,0.5\r\n" + torn)
    assert rounds(tmp_path) == [{"step": 1, "test/accuracy": 0.5, "val/accuracy": 0.5}]


def test_a_finished_run_has_every_round_and_the_test() -> None:
    row = {"step": 1.0, "test/accuracy": 0.5}
    assert is_finished([row])
    assert not is_finished([])
    assert not is_finished([{"step": 1.0}])
    assert are_whole([{"step": 1.0}])
    assert not are_whole([{**row, "step": 2.0}])


def test_a_summary_adds_up_bytes_and_keeps_the_best_round() -> None:
    """Bytes 15, 1 and 2 a round, 0.5 s and 0.25 s; rounds 2 and 3 have a validation."""
    rows = [
        {"step": 1, "communication/upload_bytes": 10, "communication/download_bytes": 5, "time/round_s": 0.5},
        {"step": 2, "communication/upload_bytes": 1, "val/accuracy": 0.75, "time/round_s": 0.25},
        {"step": 3, "communication/download_bytes": 2, "val/accuracy": 0.5, "test/accuracy": 0.6, "test/loss": 1.5},
    ]
    assert [(point["round"], point["accuracy"], point["bytes"]) for point in curve(rows, Classification())] == [
        (2, 0.75, 16), (3, 0.5, 18)
    ]  # fmt: skip
    found = summary(rows, Classification(), 0.75)
    known = {name: value for name, value in found.items() if not math.isnan(value)}
    assert known == {
        "rounds": 3, "test_accuracy": 0.6, "test_loss": 1.5, "best_accuracy": 0.75, "best_round": 2, "target": 0.75,
        "rounds_to_target": 2, "bytes_to_target": 16, "bytes": 18, "wall_seconds": 0.75,
    }  # fmt: skip
    assert math.isnan(summary(rows, Classification(), 0.76)["rounds_to_target"])
    assert math.isnan(summary(rows, Classification())["target"])
