"""A run resumes with the settings of its checkpoint, or says which differ; broken checkpoints are named."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from lightning_fedssl.algorithms import Supervised
from lightning_fedssl.data import FederatedDataModule, Shards
from lightning_fedssl.functional.schedules import Constant
from lightning_fedssl.models import MLP
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer import FederatedTrainer, settings
from tests.toy import ToyData, toy_semifl, toy_trainer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of two rounds."""
    trainer = toy_trainer(tmp_path_factory.mktemp("run"), max_rounds=2, logger=False)
    trainer.fit(toy_semifl(keep_client_optimizer=True), ToyData())
    return Path(trainer.default_root_dir) / "checkpoints/last.ckpt"


def slow(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "lr": ({"optimizer": slow}, {}, {}, "model.optimizer.lr 0.05 (now 0.01), model.server_optimizer.lr 0.05 (now"),
    "momentum": ({"aggregation_optimizer": slow}, {}, {}, "model.aggregation_optimizer.momentum 0.5 (now 0.9)"),
    "epochs": ({"client_epochs": 2}, {}, {}, "model.client_epochs 1 (now 2)"),
    "threshold": ({"threshold": 0.5}, {}, {}, "model.threshold 0.4 (now 0.5)"),
    "schedule": ({"schedule": Constant()}, {}, {}, "model.schedule Cosine (now Constant)"),
    "batch": ({}, {"client_batch_size": 7}, {}, "data.client_batch_size 5 (now 7)"),
    "cohort": ({}, {}, {"clients_per_round": 2}, "trainer.clients_per_round 3 (now 2)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_settings_are_named_and_refused_unless_allowed(
    tmp_path: Path, path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, data, settings, message = CHANGES[name]

    def resume(**kwargs: Any) -> Any:
        trainer = toy_trainer(tmp_path, max_rounds=3, **settings, **kwargs)
        trainer.fit(toy_semifl(**{"keep_client_optimizer": True} | model), ToyData(**data), ckpt_path=path)
        return trainer

    with pytest.raises(ValueError, match="is of a run with other settings: ") as refusal:
        resume()
    assert message in str(refusal.value)
    assert "--trainer.allow_changed true" in str(refusal.value)
    assert not list(tmp_path.rglob("version_*"))
    with caplog.at_level(logging.WARNING):
        assert resume(allow_changed=True, logger=False).round_index == 3
    assert message in caplog.text


def test_other_samples_of_data_in_memory_are_refused(tmp_path: Path) -> None:
    """The partition is the same: it depends on the labels."""

    def train(value: float, rounds: int, ckpt_path: str | None = None, **settings: Any) -> FederatedTrainer:
        samples = torch.linspace(-1, 1, 40).reshape(20, 2)
        samples[3, 1] = value
        pair = TensorDataset(samples, torch.arange(20) % 2)
        data = FederatedDataModule.from_datasets(
            pair, pair, num_clients=2, num_labels=4, validation=0, weak="none", strong="none"
        )
        trainer = toy_trainer(tmp_path, max_rounds=rounds, clients_per_round=2, logger=False, **settings)
        trainer.fit(Supervised(network=partial(MLP, hidden=(2,)), server_epochs=1), data, ckpt_path)
        return trainer

    train(0.5, 1)
    digits = "[0-9a-f]{16}"
    with pytest.raises(ValueError, match=rf"other settings: data\.samples_sha256 {digits} \(now {digits}\); use"):
        train(0.25, 2, "last")
    assert train(0.5, 2, "last").round_index == 2
    assert train(0.25, 3, "last", allow_changed=True).round_index == 3


def test_what_changes_no_number_may_differ(tmp_path: Path, path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=4, logger=False, check_val_every_n_rounds=2)
    data = ToyData(eval_batch_size=7)
    data.cache_dir = "elsewhere"
    trainer.fit(toy_semifl(keep_client_optimizer=True), data, ckpt_path=path)
    assert trainer.round_index == 4


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, path: Path) -> None:
    checkpoint_file.save({**checkpoint_file.load(path), "format": 99}, tmp_path / "new.ckpt")
    with pytest.raises(ValueError, match=r"new\.ckpt has the format 99, but this version reads format 4"):
        checkpoint_file.load(tmp_path / "new.ckpt")


def test_another_precision_is_refused(tmp_path: Path, path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=3, logger=False, precision="64-true", allow_changed=True)
    with pytest.raises(ValueError, match=r"trainer\.precision 32-true \(now 64-true\)"):
        trainer.fit(toy_semifl(keep_client_optimizer=True), ToyData(), ckpt_path=path)


class Noise:
    """A view as an object, as `data.weak` takes it."""

    def __init__(self, std: float) -> None:
        self.std = std
        self._calls = 0


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (Noise(0.1), Noise(5.0), ["data.weak.std 0.1 (now 5.0)"]),
        ([Noise(0.1)], [Noise(0.2)], ["data.weak.0.std 0.1 (now 0.2)"]),
        ({"a": 1.0, "b": {"c": 2}}, {"a": 1.0, "b": {"c": 3}}, ["data.weak.b.c 2 (now 3)"]),
        (Noise(0.1), [Noise(0.1)], ["data.weak Noise (now list)"]),
        (Noise(0.1), Noise(0.1), []),
        (MLP(num_classes=2, in_shape=(1, 2, 2)), MLP(num_classes=3, in_shape=(1, 2, 2)), []),
    ],
)
def test_what_is_inside_of_objects_lists_and_mappings_is_compared(before: Any, after: Any, named: list[str]) -> None:
    saved, now = (settings._flat("data", {"weak": value}) for value in (before, after))
    assert settings.differences(saved, now) == named


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_names": ("x", "y", "z")}, r"class names \['a', 'b', 'c'\], but these data have \['x', 'y', 'z'\]"),
        ({"mean": (0.25,)}, "normalization"),
    ],
)
def test_other_classes_or_another_normalisation_are_refused_at_evaluation_and_on_resuming(
    tmp_path: Path, path: Path, change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(ToyData):
        def _load(self) -> Any:
            spec, train, test = super()._load()
            return replace(spec, **change), train, test

    model = toy_semifl(keep_client_optimizer=True)
    for command in ("test", "predict", "fit"):
        with pytest.raises(ValueError, match=f"was trained on data with the {message}"):
            getattr(toy_trainer(tmp_path, logger=False), command)(model, Other(), path)
    for command in ("test", "fit"):
        with caplog.at_level(logging.WARNING):
            trainer = toy_trainer(tmp_path, logger=False, max_rounds=3, allow_changed=True)
            getattr(trainer, command)(model, Other(), path)
        assert "was trained on data with the" in caplog.text
        caplog.clear()
    toy_trainer(tmp_path, logger=False).test(model, ToyData(), path)


def test_a_normalisation_may_differ_by_rounding(tmp_path: Path, path: Path) -> None:
    """A mean over the samples depends on the order in which a machine adds them."""

    class Rounded(ToyData):
        def _load(self) -> Any:
            spec, train, test = super()._load()
            return replace(spec, mean=(spec.mean[0] * (1 + 1e-15),)), train, test

    data = Rounded()
    trainer = toy_trainer(tmp_path, max_rounds=3, logger=False)
    trainer.fit(toy_semifl(keep_client_optimizer=True), data, path)
    assert data.spec.mean != (0.5,)
    assert trainer.round_index == 3


def test_a_model_in_memory_is_evaluated_on_the_data_that_it_was_trained_with(tmp_path: Path) -> None:
    class Other(ToyData):
        def _load(self) -> Any:
            spec, train, test = super()._load()
            return replace(spec, class_names=("x", "y", "z")), train, test

    seed_everything(0, verbose=False)
    model, data = toy_semifl(), ToyData()
    trainer = toy_trainer(tmp_path, logger=False)
    trainer.fit(model, data)
    for command in ("validate", "test", "predict"):
        with pytest.raises(
            ValueError, match=r"^the model was trained on data with the class names .*give the data mod"
        ):
            getattr(trainer, command)(model, Other())
    with pytest.raises(ValueError, match=r"^the model was made on another partition of the data; give the data module"):
        trainer.validate(model, ToyData(partition=Shards()))
    trainer.test(model, ToyData(partition=Shards()))  # the test images are the same
    seed_everything(1, verbose=False)
    with pytest.raises(ValueError, match="seed_everything is 1, but the model is of a run with 0: give that seed"):
        trainer.validate(model, data)
    seed_everything(0, verbose=False)
    trainer.validate(model, data)
    toy_trainer(tmp_path, logger=False, allow_changed=True).test(model, Other())
