"""The examples of docs/data.md, run as they stand on the page; commands set up the data and do not train."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lightning_fedssl import FederatedDataModule, Signals
from lightning_fedssl.cli import main
from lightning_fedssl.cli.lightning_cli import FederatedCLI

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "data.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    rows = ["file,label,split,hospital"]
    for number in range(30):
        label, part = ("cat", "dog")[number % 2], "test" if number >= 24 else "train"
        for path in (f"photos/{part}/{label}/{number}.png", f"sites/site{number % 4 // 2}/{label}/{number}.png"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 34), (number, 100, 200 * (number % 2))).save(path)
        missing = number in (3, 5)
        rows.append(f"photos/{part}/{label}/{number}.png,{'' if missing else label},{part},h{number % 4 // 2}")
    Path("scans.csv").write_text("\n".join(rows) + "\n")
    x, y = np.random.default_rng(0).normal(size=(60, 1, 16)), np.arange(60) % 3
    np.savez("signals.npz", train=x[:45], train_labels=y[:45], test=x[45:], test_labels=y[45:])
    Path("my_module.py").write_text(
        "from tests.test_sources import Pairs as MyDataModule\n"
        "from tests.test_own_data import Rows\n"
        "class MyDataset(Rows):\n"
        "    def __init__(self, part: str):\n"
        "        super().__init__(seed={'train': 0, 'test': 1, 'extra': 2}[part], labeled=part != 'extra')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", examples("bash"), ids=lambda line: re.findall(r"dataset (\w+)", line)[0])
def test_a_command_of_the_page_sets_up_the_data(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("lightning-fedssl", "fit")
    assert main(["partition", *arguments]) == 0, capsys.readouterr().err
    assert " clients: " in capsys.readouterr().out


@pytest.mark.parametrize("text", examples("yaml"), ids=["data sets", "data module"])
def test_a_configuration_of_the_page_sets_up_the_data(folder: Path, text: str) -> None:
    model = {"class_path": "SemiFL", "init_args": {"network": "MLP", "optimizer": {"class_path": "SGD"}}}
    model["init_args"]["optimizer"]["init_args"] = {"lr": 0.1}  # type: ignore[index]
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": model, **yaml.safe_load(text)}))
    data = FederatedCLI([f"--config={folder / 'run.yaml'}"], run=False, exit_on_error=False).datamodule
    data.setup()
    assert len(data.statistics.sizes) == 3


def test_the_source_of_the_page_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    names: dict[str, type] = {}
    exec(examples("py")[0], names)
    data = FederatedDataModule(names["Counters"](), weak="none", strong="none", num_clients=2, num_labels=4)
    data.setup()
    assert data.in_shape == (2,)
    assert data.local_data(0, 1).images.dtype == torch.float32


def test_the_partition_of_the_page_can_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mypartition.py").write_text(examples("py")[1])
    (line,) = re.findall(r"^    lightning-fedssl (partition .*)$", PAGE, re.MULTILINE)
    assert main(shlex.split(line)) == 0, capsys.readouterr().err
    shares = [1 / (client + 1) ** 0.5 for client in range(20)]
    largest, smallest = (round(1248 * share / sum(shares)) for share in (shares[0], shares[-1]))
    assert f"20 clients: {smallest} to {largest} images each, 1,248 in all" in capsys.readouterr().out


def test_the_generated_signals_are_what_their_description_says() -> None:
    loaded = Signals(300, noise=0.0).load()
    sine, square, sawtooth = (loaded.train.images[loaded.train.labels == k] for k in range(3))
    assert set(square.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert float(sine.abs().max()) <= 1
    steps = sawtooth.diff(dim=-1)
    assert bool(((steps > 0) | (steps < -1)).all())  # it rises evenly and falls at once
