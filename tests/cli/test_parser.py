from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_fedssl.cli import main
from lightning_fedssl.cli.parser import load_yaml


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "x: {a: 1, b: 3, a: 2}", "[{a: 1}, {a: 1, a: 2}]"])
def test_a_key_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="the key a is given more than once"):
        load_yaml(text)


def test_numbers_are_read_as_jsonargparse_reads_them() -> None:
    assert load_yaml("{a: 1e-3, b: [x, {c: null}], d: 2020-01-01}") == {
        "a": 0.001, "b": ["x", {"c": None}], "d": "2020-01-01"
    }  # fmt: skip


def test_a_long_value_is_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "x" * 5000])
    assert len(capsys.readouterr().err) < 1000
