"""The documentation site builds without a warning, and its pages have the measured numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

import build_pictures
import build_results
import pytest

import lightning_fedssl
from lightning_fedssl.cli.entry import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    inventory = zlib.decompress((tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split(" ")[0].rpartition(".")[2] for line in inventory.splitlines()}
    assert documented >= set(lightning_fedssl.__all__)


def test_the_results_page_is_that_of_the_csv_files(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    build_results.write(page, tmp_path / "claims.csv")
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text(), "run python docs/build_results.py"
    counts = re.findall(r"\d+ of \d+ cells(?= reproduced)", page.read_text())
    assert len(counts) == 2
    assert all(count in (ROOT / "README.md").read_text() for count in counts)
    build_results.write_leaderboard(page)
    assert page.read_text() == (ROOT / "docs" / "leaderboard.md").read_text(), "run python docs/build_results.py"


def test_the_pictures_are_those_of_the_csv_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their words, and how much is drawn; coordinates depend on the version of matplotlib."""
    monkeypatch.setattr(build_pictures, "IMAGES", tmp_path)
    build_pictures.main()
    for picture in tmp_path.glob("*.svg"):
        both = [(folder / picture.name).read_text() for folder in (tmp_path, ROOT / "docs" / "images")]
        now, then = [re.findall(r">([^<]+)</text>|<(use|path|rect) ", text) for text in both]
        assert now == then, f"{picture.name}: run python docs/build_pictures.py"


def test_a_round_takes_the_path_of_the_page_on_architecture(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", page, re.MULTILINE)
    called: dict[tuple[str, str], int] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = re.sub(r"^.*/(?:lightning_fedssl/|(?=callbacks/))", "", frame.f_code.co_filename)
        called.setdefault((file, frame.f_code.co_name), len(called))

    keys = ["--trainer.max_rounds=1", "--trainer.devices=1", f"--trainer.default_root_dir={tmp_path}"]
    command = ["fit", "--config", "semifl_digits.yaml", "--model.threshold", "0", "--data.max_train_images", "300"]
    sys.setprofile(note)
    try:
        assert main([*command, *keys]) == 0
    finally:
        sys.setprofile(None)
    order = [called.get(step, -1) for step in steps]
    assert len(steps) > 10
    assert order == sorted(order), dict(zip(steps, order, strict=True))
    assert order[0] >= 0
