from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from lightning_fedssl.algorithms import FedAvg, FixMatch, Supervised
from lightning_fedssl.callbacks import LabelsAlone, labels_alone
from lightning_fedssl.callbacks.labels_alone import CHOSEN, next_step, verdict
from lightning_fedssl.callbacks.simple_classifiers import simple_answers
from lightning_fedssl.cli import export
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.models import CNN, MLP
from lightning_fedssl.sampling import SERVER
from lightning_fedssl.task import MultiLabel
from lightning_fedssl.trainer import FederatedTrainer
from tests.toy import ToyData, sgd, toy_trainer


def method(**kwargs: Any) -> FixMatch:
    network = partial(CNN, width=4, norm="static_batch")
    return FixMatch(network=network, optimizer=sgd, threshold=0.4, server_steps=3, label_mode="eval", **kwargs)


def run(folder: Path, rounds: int = 2, ckpt_path: Path | None = None, **kwargs: Any) -> FederatedTrainer:
    callbacks = [LabelsAlone(kwargs.pop("expected_gain", -0.02))]
    devices = kwargs.pop("devices", 1)
    data = ToyData(validation=kwargs.pop("validation", 0.2))
    trainer = toy_trainer(
        folder, max_rounds=rounds, clients_per_round=2, devices=devices, callbacks=callbacks, enable_progress_bar=True
    )
    trainer.fit(method(**kwargs), data, ckpt_path)
    return trainer


def folder_of(trainer: FederatedTrainer) -> Path:
    return Path(trainer.log_dir or "")


def test_the_bound_is_supervised_training_with_the_servers_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path / "method")
    printed = capsys.readouterr().out.splitlines()
    alone = toy_trainer(tmp_path / "alone", max_rounds=2, clients_per_round=1, logger=False)
    bound = Supervised(network=partial(CNN, width=4, norm="static_batch"), optimizer=sgd, server_steps=3)
    alone.fit(bound, ToyData(validation=0.2))
    expected = float(alone.callback_metrics["test/accuracy"])
    assert float(trainer.callback_metrics["bound/accuracy"]) == expected
    result = json.loads((folder_of(trainer) / "result.json").read_text())
    assert result["metrics"]["bound/accuracy"] == expected
    described = json.loads((folder_of(trainer) / "checkpoints/model.json").read_text())
    assert described["metrics"]["bound/accuracy"] == expected
    accuracy = result["metrics"]["test/accuracy"]
    assert verdict(expected, accuracy, 60, "image") in printed
    assert printed[-3].endswith(f"with the clients' images {100 * accuracy:.1f} %")
    assert "presets/pretrained_images.yaml" in printed[-1]  # of images without a backbone


def test_a_resumed_run_and_two_ranks_have_the_same_bound(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", rounds=3)
    first = run(tmp_path / "first", rounds=2)
    resumed = run(tmp_path / "resumed", rounds=3, ckpt_path=folder_of(first) / "checkpoints/last.ckpt")
    ranks = run(tmp_path / "ranks", rounds=3, devices=2)
    names = ("bound/accuracy", "test/loss")
    expected = [float(whole.callback_metrics[name]) for name in names]
    for other in (resumed, ranks):
        assert [float(other.callback_metrics[name]) for name in names] == expected


def test_with_labels_at_the_clients_a_run_goes_on_without_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[LabelsAlone()], clients_per_round=2)
    trainer.fit(FedAvg(network=CNN, optimizer=sgd), ToyData(label_location="clients"))
    assert "data.label_location is clients" in caplog.text
    assert "bound/accuracy" not in trainer.callback_metrics
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: lightning-fedssl export")


@pytest.mark.parametrize(
    ("bound", "accuracy", "expected", "step"),
    [
        (0.739, 0.782, "better by 4.3 points, 3 of 69 test images (standard error 5 images)", "repeat with"),
        (0.8, 0.4, "worse by 40.0 points, 28 of 69 test images (standard error 5 images)", "use extra trees or"),
        (
            0.4,
            0.8,
            "better by 40.0 points, 28 of 69 test images (standard error 5 images)",
            "export X writes the model",
        ),
        (0.5, 0.5, "no difference on 69 test images (standard error 6 images)", "repeat with"),
    ],
)
def test_the_verdict_says_which_is_better_and_what_to_do(
    bound: float, accuracy: float, expected: str, step: str
) -> None:
    assert verdict(bound, accuracy, 69, "image").endswith(expected)
    assert step in next_step("extra trees", bound, accuracy, 69, "export X")


@pytest.mark.parametrize(
    ("accuracy", "bound", "count", "expected", "chosen"),
    [
        (0.0, 0.0, 0, -0.02, False),
        (0.0, 0.0, 0, 0.02, True),
        (1.0, 0.0, 1, -0.02, False),  # one right sample is no evidence, also at 100 %
        (0.9, 0.8, 20, -0.02, False),
        (0.9, 0.8, 200, -0.02, True),
        (0.8, 0.9, 200, 0.02, False),
        (0.8, 0.8, 10_000, -0.02, False),
    ],
)
def test_the_labels_alone_are_chosen_unless_a_gain_is_shown(
    accuracy: float, bound: float, count: int, expected: float, chosen: bool
) -> None:
    gain, error = labels_alone.estimate_gain(accuracy, bound, count, expected)
    assert (gain > 0) == chosen
    assert 0 < error <= labels_alone.EXPECTED_ERROR


@pytest.mark.parametrize("expected", [-0.5, 0.5])
def test_the_chosen_model_is_exported_and_its_accuracy_reported(
    tmp_path: Path, expected: float, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path, expected_gain=expected, validation=0)  # so that there is no best.ckpt
    result = json.loads((folder_of(trainer) / "result.json").read_text())
    method, of = ("FixMatch", "test") if expected > 0 else ("Supervised", "bound")
    assert result["chosen/method"] == method
    assert result["metrics"]["chosen/accuracy"] == result["metrics"][f"{of}/accuracy"]
    assert export.main(["--default_root_dir", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert export.main(["--default_root_dir", str(tmp_path), "--output", str(tmp_path), "--ckpt_path", "last"]) == 0
    read = [line for line in capsys.readouterr().out.splitlines() if line.startswith("read: ")]
    folder = folder_of(trainer) / "checkpoints"
    assert read == [f"read: {folder / CHOSEN}, {method}, round 2", f"read: {folder / 'last.ckpt'}, FixMatch, round 2"]


def test_simple_classifiers_are_fitted_to_the_servers_labels_and_ordered_by_them(tmp_path: Path) -> None:
    data = ToyData(num_labels=20, validation=0)
    data.setup()
    answers = simple_answers(data)
    assert {a.name for a in answers} == {"logistic regression", "extra trees"}
    assert [a.estimate for a in answers] == sorted((a.estimate for a in answers), reverse=True)
    own = data.local_data(SERVER, 1)
    x, y = next(data.evaluation_batches("test"))
    fitted = LogisticRegression(max_iter=200).fit(own.plain(own.labeled).flatten(1), own.labels)
    expected = fitted.score(x.flatten(1), y)
    assert {a.name: a.accuracy for a in answers}["logistic regression"] == pytest.approx(expected)


def test_series_have_random_kernels_and_features_of_a_backbone_do_not() -> None:
    labels = torch.arange(40) % 2
    x = torch.randn(40, 1, 16, generator=torch.Generator().manual_seed(0))
    x[labels == 1, 0, 4:] += torch.linspace(-2, 2, 12)
    given: Any = {"num_clients": 2, "num_labels": 8, "validation": 0, "weak": "none", "strong": "none"}
    for backbone, expected in ((None, True), (lambda x: x.flatten(1), False)):
        data = FederatedDataModule.from_datasets((x, labels), (x, labels), backbone=backbone, **given)
        data.setup()
        assert ("random kernels" in {a.name for a in simple_answers(data)}) == expected


def test_a_task_without_accuracy_has_a_bound_and_no_choice(tmp_path: Path) -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, :2] > 0).float()
    data = FederatedDataModule.from_datasets(
        (x, y), (x, y), task=MultiLabel(), num_clients=2, num_labels=8, validation=0, weak="none", strong="none"
    )
    callback = LabelsAlone()
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=2, callbacks=[callback])
    trainer.fit(FixMatch(network=partial(MLP, hidden=()), optimizer=sgd, threshold=0.4, server_steps=1), data)
    bound = float(trainer.callback_metrics["bound/average_precision"])
    assert f"labels alone {bound:.4f}" in callback.lines[0]
    assert not list(tmp_path.rglob("chosen.ckpt"))
