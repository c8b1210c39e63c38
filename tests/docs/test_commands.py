"""The commands and programs of README and documentation, taken from the pages: all are understood, and all run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import notebooks
import numpy as np
import pytest
from PIL import Image

from lightning_fedssl.cli.entry import main

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
READERS = ("fit", "validate", "test", "predict")
"""Commands that print the configuration which they have read."""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, title and text of the code blocks of a page."""
    return [match.groups("") for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]  # type: ignore[misc]


def commands(text: str) -> list[list[str]]:
    """The package's commands in the text of a block, as arguments."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    return [line[1:] for line in lines if line[:1] == ["lightning-fedssl"]]


PAGES_WITH_CODE = [
    page
    for page in PAGES
    if any(commands(text) if kind == "bash" else kind == "python" and not title for kind, title, text in blocks(page))
]
COMMANDS = [
    pytest.param(page, command, id=f"{page}: {' '.join(command)}"[:120])
    for page in PAGES
    for kind, _, text in blocks(page)
    if kind in ("bash", "console")
    for command in commands(text)
    if command[0] in READERS and not any(word.endswith("help") for word in command)
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the titled files of the page."""
    titled = {title: text for _, title, text in blocks(request.getfixturevalue("page")) if title}
    for name, text in titled.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write_data(folder: Path) -> None:
    """Images of three classes in folders, of two sites and in a CSV file; signals; a table; new images."""
    generator = np.random.default_rng(0)
    rows = ["file,label,split,hospital"]

    def image(place: str, kind: int) -> None:
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(60 * kind, 60 * kind + 120, (12, 12, 3), dtype=np.uint8)).save(path)

    for number in range(12):
        for kind, name in enumerate(("benign", "malignant", "other")):
            image(f"photos/train/{name}/{number}.png", kind)
            image(f"photos/test/{name}/{number}.png", kind)
            image(f"photos/unlabeled/{name}{number}.png", kind)
            image(f"new_images/{name}{number}.png", kind)
            for site in ("north", "south"):
                image(f"sites/{site}/{name}/{number}.png", kind)
                split = ("train", "test", "unlabeled")[number % 3]
                rows.append(f"sites/{site}/{name}/{number}.png,{'' if split == 'unlabeled' else name},{split},{site}")
    (folder / "scans.csv").write_text("\n".join(rows))
    kinds = (("yes,north,ill", "no,north,well", "yes,south,ill", "no,south,well")[row % 4] for row in range(60))
    patients = [f"{40 + row % 7},0.{row},{kind},{'train' if row % 5 else 'test'}" for row, kind in enumerate(kinds)]
    (folder / "patients.csv").write_text("\n".join(["age,marker,smoker,hospital,label,split", *patients]))
    labels = np.arange(90) % 3
    signals = generator.normal(labels[:, None, None], 1, (90, 3, 64)).astype(np.float32)
    parts = {"train": signals[:60], "train_labels": labels[:60], "test": signals[60:], "test_labels": labels[60:]}
    np.savez(folder / "signals.npz", **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_understood(
    folder: Path, page: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "my_method.yaml" in command:
        assert main(["new", "MyMethod"]) == 0
    if "lora.yaml" in command:
        pytest.importorskip("peft")
    with pytest.raises(SystemExit) as end:
        main([*command, "--print_config"])
    assert end.value.code == 0, capsys.readouterr().err


def run_command(command: list[str]) -> None:
    """A run ends after two rounds, a resumed one after three."""
    shows = any(word.endswith(("help", "print_config")) for word in command)
    trains, rounds = command[0] in ("fit", "compare") and not shows, 2 + ("--ckpt_path" in command)
    try:
        code = main([*command, *(["--trainer.max_rounds", str(rounds)] if trains else [])])
    except SystemExit as end:  # --help, --print_config
        code = end.code  # type: ignore[assignment]
    assert code == 0, command


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_the_page_runs(folder: Path, page: str) -> None:
    """In the order of the page."""
    if page == "docs/pretrained.md":
        pytest.importorskip("peft")
    write_data(folder)
    names: dict[str, Any] = {"__name__": "page"}
    for kind, title, text in blocks(page):
        if kind == "python" and not title:
            exec(compile(text, page, "exec"), names)
        for command in commands(text) if kind == "bash" else []:
            run_command(command)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "own_images"])
def test_the_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, all cells of code but magics such as %pip."""
    monkeypatch.chdir(tmp_path)
    made = [cell["source"] for cell in notebooks.notebook(name)["cells"] if cell["cell_type"] == "code"]
    assert "".join(made).count("!lightning-fedssl") >= 2
    for source in made:
        for command in commands(source.replace("!", "")) if source[0] == "!" else []:
            run_command(command)
        if source.startswith("%%writefile"):
            Path(source.split()[1]).write_text(source.partition("\n")[2])
        elif source[0] not in "!%":
            exec(compile(source, name, "exec"), {"__name__": "notebook"})
