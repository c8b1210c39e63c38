from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from examples.diagnostics.stage_losses import StageLosses
from torch import nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from tests.algorithms.helpers import toy_fixmatch, toy_semi_sfl, toy_supervised
from tests.toy import ToyData, assert_same, forked, toy_semifl, toy_trainer, weights

NAMES = [f"after_{when}/{what}_loss" for when in ("server", "round") for what in ("supervised", "unlabeled")]


class Record(StageLosses):
    """Also keeps the models that it measures."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.models: dict[str, dict[str, Any]] = {}

    def _log(self, trainer: Any, algorithm: Any, stage: str) -> None:
        self.models[stage] = {"network": weights(algorithm), "evaluated": dict(algorithm.evaluated_model())}
        super()._log(trainer, algorithm, stage)


def fitted(folder: Path, make: Any, callbacks: list[Any], **settings: Any) -> Any:
    algorithm, trainer = make(), toy_trainer(folder, callbacks=callbacks, logger=False, **settings)
    trainer.fit(algorithm, ToyData())
    return algorithm, trainer


@pytest.mark.parametrize(("make", "different"), [(toy_semi_sfl, 4), (toy_semifl, 2)])
def test_measuring_does_not_change_the_training(make: Any, different: int, tmp_path: Path) -> None:
    """In SemiFL the server trains last, so that both measurements of a round are of the same model."""
    plain, _ = fitted(tmp_path / "1", make, [], max_rounds=2)
    measured, trainer = fitted(tmp_path / "2", make, [StageLosses(threshold=0.4)], max_rounds=2)
    assert_same(weights(plain), weights(measured))
    values = [float(trainer.callback_metrics[name]) for name in NAMES]
    assert all(value > 0 for value in values)
    assert len(set(values)) == different


def test_the_losses_are_those_of_the_formulas(tmp_path: Path) -> None:
    """Semi-SFL: the teacher labels weak views, the student is applied to strong ones, after either stage."""
    callback = Record(threshold=0.34, max_images=10)
    algorithm, trainer = fitted(tmp_path, toy_semi_sfl, [callback], max_rounds=1, precision="64-true")
    server = trainer.local_data(sampling.SERVER)
    pool = trainer.datamodule.unlabeled_pool()
    images = torch.stack([pool[len(pool) * k // 10] for k in range(10)])
    whole: nn.Module = algorithm.eval()
    for stage, models in callback.models.items():
        whole.load_state_dict(models["evaluated"], strict=False)
        chances = whole(server.weak(images, "stage losses, weak")).softmax(dim=1).max(dim=1)
        whole.load_state_dict(models["network"], strict=False)
        each = F.cross_entropy(whole(server.strong(images, "stage losses, strong")), chances.indices, reduction="none")
        confident = chances.values >= 0.34
        expected = each[confident].sum() / 10
        logged = float(trainer.callback_metrics[f"{stage}/unlabeled_loss"])
        assert logged == pytest.approx(expected.item(), rel=1e-9)
        ten = [12 * k // 10 for k in range(10)]
        supervised = F.cross_entropy(whole(server.plain(server.labeled[ten])), server.labels[ten])
        logged = float(trainer.callback_metrics[f"{stage}/supervised_loss"])
        assert logged == pytest.approx(supervised.item(), rel=1e-9)


def test_two_ranks_log_the_same(tmp_path: Path) -> None:
    logged = []
    for ranks in (1, 2):
        _, trainer = fitted(
            tmp_path / str(ranks), toy_semi_sfl, [StageLosses(threshold=0.4)], max_rounds=1, precision="64-true",
            **forked(ranks),
        )  # fmt: skip
        logged.append([float(trainer.callback_metrics[name]) for name in NAMES])
    assert logged[1] == pytest.approx(logged[0], rel=1e-9)


def test_labels_at_the_clients_are_refused(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[StageLosses()], logger=False)
    with pytest.raises(ValueError, match=r"set data\.label_location to server, or remove the callback"):
        trainer.fit(toy_fixmatch(), ToyData(label_location="clients"))


def test_clients_without_images_are_refused(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[StageLosses()], logger=False)
    with pytest.raises(ValueError, match=r"StageLosses needs data at the clients: lower data\.num_labels"):
        trainer.fit(toy_supervised(), ToyData(num_labels="all", validation=0))


def test_static_batch_norm_uses_the_statistics_of_the_measured_images(tmp_path: Path) -> None:
    """The statistics of the global model were measured before the round's training."""
    callback = Record(threshold=0.34)
    algorithm, trainer = fitted(tmp_path, toy_semifl, [callback], max_rounds=1, precision="64-true")
    server = trainer.local_data(sampling.SERVER)
    whole: nn.Module = algorithm.train()
    for stage, models in callback.models.items():
        whole.load_state_dict(models["network"], strict=False)
        expected = F.cross_entropy(whole(server.plain(server.labeled)), server.labels)
        logged = float(trainer.callback_metrics[f"{stage}/supervised_loss"])
        assert logged == pytest.approx(expected.item(), rel=1e-9)
