from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import CONFIG, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds ``run.yaml``, a small run."""
    monkeypatch.chdir(tmp_path)
    write("run.yaml", CONFIG)
    return tmp_path
