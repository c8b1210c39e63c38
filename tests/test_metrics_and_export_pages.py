"""The examples of docs/metrics.md and docs/export.md, run as they stand on the page."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lightning_fedssl.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"


def examples(page: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found


def run(block: str) -> None:
    for line in block.strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "lightning-fedssl"
        assert main(arguments) == 0


def test_the_page_on_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new_images").mkdir()
    Image.new("L", (20, 30), 128).save("new_images/grey.png")
    train_and_export, train_own, predict = examples("export.md", "bash")
    run(train_and_export)
    script, own_network, load = examples("export.md", "python")
    check = "import sys\nassert not any(n.startswith('lightning') for n in sys.modules)\n"
    subprocess.run([sys.executable, "-c", f"{script}\n{check}assert logits.shape == (4, 10)"], check=True)
    Path("my_network.py").write_text(own_network)
    monkeypatch.syspath_prepend(tmp_path)  # the program does so itself
    run(train_own)
    check += "import torch\ntorch.save(network.state_dict(), 'found.pt')"
    subprocess.run([sys.executable, "-c", f"{load}\n{check}"], check=True)
    (path,) = Path("runs/small").rglob("model.safetensors")
    found = torch.load("found.pt")
    assert found.keys() == load_file(path).keys()
    assert all(torch.equal(t, found[name]) for name, t in load_file(path).items())
    run(predict)
    (path,) = Path("runs").rglob("predictions.csv")
    with path.open() as file:
        (row,) = csv.DictReader(file)
    assert row["file"] == "grey.png"
    assert row["class_name"] == row["prediction"]
    assert sum(float(row[f"probability_{k}"]) for k in range(10)) == pytest.approx(1, abs=1e-4)


def test_the_page_on_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = examples("metrics.md", "yaml")
    Path("metrics.yaml").write_text(text)
    (command,) = examples("metrics.md", "bash")
    run(command)
    (folder,) = Path("runs/fedavg_digits/lightning_logs").iterdir()
    with (folder / "metrics.csv").open() as file:
        logged = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    page = (DOCS / "metrics.md").read_text()
    named = set(re.findall(r"`((?:val|client_test)/[a-z_0-9]+)`", page)) - {"val/m"}
    assert named <= logged
    assert {f"{stage}/recall/class_{k}" for stage in ("val", "test") for k in range(10)} <= logged
    assert (folder / "val_confusion_matrix.csv").is_file()
    with (folder / "client_evaluation.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 20


def test_the_page_on_pretrained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SemiFL starts from the supervised model, whose accuracy two rounds could not reach, and keeps its first layer."""
    monkeypatch.chdir(tmp_path)
    (commands,) = examples("pretrained.md", "bash")
    run(commands)
    first, second = (
        Path(f"runs/{name}/lightning_logs/version_0/checkpoints") for name in ("supervised_digits", "semifl_digits")
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert torch.equal(before["convs.0.weight"], after["convs.0.weight"])
    assert not torch.equal(before["convs.1.weight"], after["convs.1.weight"])
    accuracy = json.loads((second / "model.json").read_text())["metrics"]["test/accuracy"]
    assert accuracy > 0.6
    (text,) = examples("pretrained.md", "yaml")
    Path("pretrained.yaml").write_text(text)
    again = ["--config", "pretrained.yaml", "--trainer.max_rounds=2", "--trainer.default_root_dir=again"]
    assert main(["fit", "--config", "semifl_digits.yaml", *again]) == 0
    (path,) = Path("again").rglob("model.safetensors")
    assert all(torch.equal(t, after[name]) for name, t in load_file(path).items())
