from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import FixMatch, Supervised
from lightning_fedssl.callbacks import LabelsAlone
from lightning_fedssl.callbacks.labels_alone import CHOSEN, choose, verdict
from lightning_fedssl.cli import export
from lightning_fedssl.models import CNN
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer import FederatedTrainer
from tests.toy import ToyData, sgd


def method(**kwargs: Any) -> FixMatch:
    network = partial(CNN, width=4, norm="static_batch")
    return FixMatch(network=network, optimizer=sgd, threshold=0.4, server_steps=3, label_mode="eval", **kwargs)


def run(folder: Path, rounds: int = 2, ckpt_path: Path | None = None, **kwargs: Any) -> FederatedTrainer:
    trainer = FederatedTrainer(
        max_rounds=rounds, clients_per_round=2, accelerator="cpu", devices=kwargs.pop("devices", 1),
        callbacks=[LabelsAlone()], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(method(**kwargs), ToyData(validation=0.2), ckpt_path)
    return trainer


def folder_of(trainer: FederatedTrainer) -> Path:
    return Path(trainer.log_dir or "")


def test_the_bound_is_supervised_training_with_the_servers_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path / "method")
    printed = capsys.readouterr().out.splitlines()
    alone = FederatedTrainer(
        max_rounds=2, clients_per_round=1, accelerator="cpu", logger=False, default_root_dir=tmp_path / "alone"
    )
    bound = Supervised(network=partial(CNN, width=4, norm="static_batch"), optimizer=sgd, server_steps=3)
    alone.fit(bound, ToyData(validation=0.2))
    expected = float(alone.callback_metrics["test/accuracy"])
    assert float(trainer.callback_metrics["bound/accuracy"]) == expected
    result = json.loads((folder_of(trainer) / "result.json").read_text())
    assert result["metrics"]["bound/accuracy"] == expected
    described = json.loads((folder_of(trainer) / "checkpoints/model.json").read_text())
    assert described["metrics"]["bound/accuracy"] == expected
    assert printed[-1] == verdict(expected, result["metrics"]["test/accuracy"], 60, "image")


def test_a_resumed_run_and_two_ranks_have_the_same_bound(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", rounds=3)
    first = run(tmp_path / "first", rounds=2)
    resumed = run(tmp_path / "resumed", rounds=3, ckpt_path=folder_of(first) / "checkpoints/last.ckpt")
    ranks = run(tmp_path / "ranks", rounds=3, devices=2)
    names = ("bound/accuracy", "test/loss")
    expected = [float(whole.callback_metrics[name]) for name in names]
    for other in (resumed, ranks):
        assert [float(other.callback_metrics[name]) for name in names] == expected


def test_labels_at_the_clients_are_refused(tmp_path: Path) -> None:
    trainer = FederatedTrainer(callbacks=[LabelsAlone()], clients_per_round=2, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"LabelsAlone .* data.label_location is clients"):
        trainer.fit(method(), ToyData(label_location="clients"))


@pytest.mark.parametrize(
    ("bound", "accuracy", "expected"),
    [
        (0.739, 0.782, "better by 4.3 points (69 test images: 3 images)"),
        (0.5, 0.4856, "worse by 1.4 points (69 test images: 1 image)"),
        (0.5, 0.5, "no difference (69 test images: 0 images)"),
    ],
)
def test_the_verdict_says_which_is_better(bound: float, accuracy: float, expected: str) -> None:
    assert verdict(bound, accuracy, 69, "image").endswith(expected)


@pytest.mark.parametrize(
    ("last", "best", "bound", "expected"),
    [
        (0.8, 0.85, 0.8, "last"),  # the best of many measurements on few images is chance
        (0.3, 0.85, 0.8, "best"),  # a collapse
        (0.8, 0.85, 0.81, "alone"),
        (0.3, 0.85, 0.9, "alone"),
    ],
)
def test_the_chosen_model_is_the_last_one_unless_another_is_better(
    tmp_path: Path, last: float, best: float, bound: float, expected: str
) -> None:
    trainer = run(tmp_path)
    folder = folder_of(trainer) / "checkpoints"
    for name, accuracy, rounds in (("best.ckpt", best, 7), ("alone.ckpt", bound, 8)):
        content = checkpoint_file.load(folder / "last.ckpt")
        content["metrics"]["val/accuracy"], content["round"] = accuracy, rounds
        checkpoint_file.save(content, folder / name)
    trainer.callback_metrics["val/accuracy"] = torch.tensor(last)
    line = choose(trainer, bound, folder / "alone.ckpt")
    assert checkpoint_file.load(folder / CHOSEN)["round"] == {"last": 2, "best": 7, "alone": 8}[expected]
    assert expected in (line or "last")


def test_export_takes_the_chosen_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(run(tmp_path)) / "checkpoints"
    assert export.main(["--default_root_dir", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert export.main(["--default_root_dir", str(tmp_path), "--output", str(tmp_path), "--ckpt_path", "last"]) == 0
    read = [line for line in capsys.readouterr().out.splitlines() if line.startswith("read: ")]
    assert read == [f"read: {folder / CHOSEN}, Supervised, round 2", f"read: {folder / 'last.ckpt'}, FixMatch, round 2"]
