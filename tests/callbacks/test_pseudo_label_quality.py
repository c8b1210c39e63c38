from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import PseudoLabelQuality, pseudo_label_quality
from tests.algorithms.helpers import toy_fixmatch, toy_rgd
from tests.callbacks.helpers import NoDiagnostics
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights


@pytest.mark.parametrize("make", [toy_rgd, toy_fixmatch], ids=["FedRGD", "FixMatch"])
def test_labels_of_methods_that_label_at_their_steps_are_sampled(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diagnostics change no bit of the weights; the sample's labels are those of the received model."""
    seen: list[int] = []

    class Sizes(FederatedCallback):
        def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
            seen.append(len(data.unlabeled))

    trained = []
    monkeypatch.setattr(pseudo_label_quality, "SAMPLE", 6)
    for quality in (NoDiagnostics(), PseudoLabelQuality()):
        algorithm = make()
        algorithm.threshold = 0.0
        trainer = toy_trainer(tmp_path, clients_per_round=3, callbacks=[quality, Sizes()])
        trainer.fit(algorithm, ToyData())
        trained.append(weights(algorithm))
        assert ("pseudo_label/accuracy" in trainer.callback_metrics) == (type(quality) is PseudoLabelQuality)
    assert_same(*trained)
    assert min(seen) > 2
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["pseudo_label/accuracy"] == pytest.approx(metrics["pseudo_label/confident_accuracy"])
    assert metrics["pseudo_label/accuracy"] * 6 == pytest.approx(round(metrics["pseudo_label/accuracy"] * 6))
    assert 1 / 3 <= metrics["pseudo_label/largest_class_share"] <= 1


def test_labels_that_a_method_made_are_compared_whole(tmp_path: Path) -> None:
    """SemiFL labels every image of a client before it trains: nothing is sampled."""
    algorithm, made = toy_semifl(threshold=0.0), []

    class Made(FederatedCallback):
        def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
            truth = trainer.datamodule.true_labels(data.unlabeled)
            made.append((trainer.round_index, work.pseudo_labels.labels, truth))

    trainer = toy_trainer(tmp_path, callbacks=Made())
    trainer.fit(algorithm, ToyData())
    labels, truth = (torch.cat([row[k] for row in made if row[0] == 3]) for k in (1, 2))
    share = float(labels.bincount().max()) / len(labels)
    assert trainer.callback_metrics["pseudo_label/confident_count"] == len(labels)
    assert float(trainer.callback_metrics["pseudo_label/largest_class_share"]) == pytest.approx(share)
    accuracy = float((labels == truth).double().mean())
    assert float(trainer.callback_metrics["pseudo_label/accuracy"]) == pytest.approx(accuracy)
