"""The benchmark of Fed-SHVR's Table I: the run of a cell, and that a stopped cell resumes to the same result."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_fedssl.data import datasets
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def table1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, on random images of MNIST's shape."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", random_mnist)
    import fed_shvr_table1

    return fed_shvr_table1


def random_mnist(name: str, *_: Any, **__: Any) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
    generator = torch.Generator().manual_seed(0)

    def split(per_class: int) -> ImageSplit:
        labels = torch.arange(10).repeat(per_class)
        return ImageSplit(torch.randint(256, (len(labels), 1, 28, 28), dtype=torch.uint8, generator=generator), labels)

    return datasets.describe(name), split(100), split(3)


def command(tmp_path: Path, name: str, *more: str) -> list[str]:
    files = ["--csv", str(tmp_path / f"{name}.csv"), "--curves", str(tmp_path / f"{name}_curves.csv")]
    small = ["--rounds", "7", "--seeds", "1", "--hidden", "6", "--images", "1000", "--every", "1", "--splits", "noniid"]
    return [*files, *small, "--cells", "fedshvr 0.75 0.1", *more]


def results(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()[1:]]


def test_a_stopped_cell_resumes_from_its_checkpoint_to_the_same_result(
    table1: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table1.main(command(tmp_path, "whole"))
    (whole,) = results(tmp_path / "whole.csv")
    assert whole[:7] == ["fedshvr 0.75 0.1", "noniid", "default", "6", "1000", "7", "0"]

    on_round_end = table1.Watch.on_round_end

    def stopping(watch: Any, trainer: Any, *rest: Any) -> None:
        on_round_end(watch, trainer, *rest)
        if trainer.round_index == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    keep = ("--keep", str(tmp_path / "kept"))
    monkeypatch.setattr(table1.Watch, "on_round_end", stopping)
    with pytest.raises(SystemExit, match="stopped after round 3"):
        table1.main(command(tmp_path, "parts", *keep))
    assert not (tmp_path / "parts.csv").exists()
    monkeypatch.setattr(table1.Watch, "on_round_end", on_round_end)
    table1.main(command(tmp_path, "parts", *keep))
    (parts,) = results(tmp_path / "parts.csv")
    assert parts[:9] == whole[:9]
    assert not any((tmp_path / "kept").iterdir())
    assert results(tmp_path / "parts_curves.csv") == results(tmp_path / "whole_curves.csv")
    assert [row[6] for row in results(tmp_path / "parts_curves.csv")] == list("1234567")

    capsys.readouterr()
    table1.main(command(tmp_path, "parts", *keep))
    assert len(results(tmp_path / "parts.csv")) == 1
    assert f"| fedshvr 0.75 0.1 | - | - | {float(whole[7]):.1f} ± 0.0 (1) | - |" in capsys.readouterr().out


def test_every_cell_has_a_configuration_and_keeps_to_its_own_options(table1: ModuleType) -> None:
    for cell in [*table1.PAPER, *table1.FURTHER, *table1.OTHERS]:
        for split in ("iid", "noniid"):
            config, changes = table1.options(cell, split, "default", ("optimizer.lr=1",))
            assert (BENCHMARKS.parent / "configs" / config).is_file()
            assert len({change.partition("=")[0] for change in changes[-5:]}) == len(changes[-5:])
    _, changes = table1.options("fedshvr 0.75 0", "iid", "default", ("optimizer.lr=1",))
    assert changes == [
        "--model.alpha1=0.75", "--model.alpha2=0", "--model.ramp_epochs=50",
        "--model.label_alpha0=final", "--model.r2=from_uniform",
        "--model.optimizer.lr=1",
    ]  # fmt: skip
    assert table1.options("fedavg 600 tau", "iid", "default")[1][-4:] == [
        f"--model.{option}" for option in table1.SUPERVISED_ONLY
    ]
    assert table1.options("fedpseudo", "noniid", "literal", ("alpha0=3",)) == ("pseudolabel_mnist_noniid.yaml", [])


def test_what_is_varied_of_data_and_trainer_reaches_every_method_and_its_row(table1: ModuleType) -> None:
    vary = ("alpha0=3", "data.weak=crop")
    for cell in [*table1.PAPER, *table1.FURTHER, *table1.OTHERS]:
        assert "--data.weak=crop" in table1.options(cell, "iid", "default", vary)[1]
    label = ", ".join(["default", *vary])
    assert table1.variant_of("fedshvr 0 0", label) == "default, alpha0=3, data.weak=crop"
    assert table1.variant_of("fedavg 600", label) == "-, data.weak=crop"
    assert table1.variant_of("fedavg 600", "default, alpha0=3") == "-"


def test_variants_that_differ_in_r2_alone_share_the_cells_without_it(table1: ModuleType) -> None:
    assert table1.variant_of("fedshvr 0.75 0", "printed, alpha0=3") == "default, alpha0=3"
    assert table1.variant_of("fedshvr 0.75 0.1", "printed") == "printed"
    assert table1.variant_of("fedshvr 0.75 0", "literal") == "literal"
