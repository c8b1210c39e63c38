"""The documentation site builds without a warning, and its pages have the measured numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert result.returncode == 0, result.stderr


def test_the_results_page_is_that_of_the_csv_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import build_results  # type: ignore[import-not-found]

    page = tmp_path / "results.md"
    build_results.write(page, tmp_path / "claims.csv")
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text(), "run python docs/build_results.py"
