from __future__ import annotations

from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import FixMatch
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import (
    PseudoLabelQuality,
)
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.models import CNN
from tests.algorithms.helpers import toy_rgd
from tests.toy import ToyData, assert_same, sgd, toy_semifl, toy_trainer, weights


def toy_fixmatch() -> FixMatch:
    return FixMatch(
        network=partial(CNN, width=4, norm="static_batch"),
        optimizer=sgd,
        threshold=0.0,
        num_classes=3,
        in_shape=(1, 8, 8),
    )


@pytest.mark.parametrize("make", [toy_rgd, toy_fixmatch], ids=["FedRGD", "FixMatch"])
def test_labels_of_methods_that_label_at_their_steps_are_sampled(tmp_path: Path, make: Any) -> None:
    """Diagnostics change no bit of the weights; the sample's labels are those of the received model."""
    seen: list[int] = []

    class Sizes(FederatedCallback):
        def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
            seen.append(len(data.unlabeled))

    trained = []
    for sample in (0, 6):
        algorithm = make()
        algorithm.threshold = 0.0
        trainer = toy_trainer(
            tmp_path / str(sample), clients_per_round=3, callbacks=[PseudoLabelQuality(sample=sample), Sizes()]
        )
        trainer.fit(algorithm, ToyData())
        trained.append(weights(algorithm))
        assert ("pseudo_label/accuracy" in trainer.callback_metrics) == (sample > 0)
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


class OfFive:
    """A trainer whose five images have these true classes; the fifth one's is unknown."""

    round_index, is_global_zero, log_dir, loggers = 4, True, "", ()
    truth = torch.tensor([0, 1, 2, 1, -1])
    participation = MappingProxyType({0: "finished", 1: "skipped", 2: "rejected"})

    class datamodule:  # noqa: N801
        num_classes, has_unknown_labels = 3, True

        class spec:  # noqa: N801
            class_names = ("a", "b", "c")

        @staticmethod
        def true_labels(indices: torch.Tensor) -> torch.Tensor:
            return OfFive.truth[indices]

    def log(self, *scalar: Any) -> None:
        """Scalars are tested elsewhere."""

    def gather(self, value: Any) -> list[Any]:
        """This rank, and a rank without clients."""
        return [value, None]


@pytest.mark.parametrize(("every", "is_last"), [(0, True), (3, False), (3, True), (4, False)])
def test_the_matrix_of_pseudo_labels_by_hand(tmp_path: Path, every: int, is_last: bool) -> None:
    """Image 0 is right, 2 and 3 are labelled b; 1 is not confident, and 4 has no known class. Client 2 is rejected.

    Round 4 is due for 4, and for 3 if it is the last.
    """
    quality: Any = PseudoLabelQuality(matrix_every_n_rounds=every)
    trainer = OfFive()
    trainer.log_dir = str(tmp_path)
    labels, mask = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([True, False, True, True, True])
    quality.on_round_start(trainer, None)
    for client, part in ((0, slice(0, 2)), (0, slice(2, 3)), (1, slice(3, 5)), (2, slice(0, 5))):
        algorithm = SimpleNamespace(clients=SimpleNamespace(staging=client))
        pseudo = PseudoLabels(labels[part], torch.ones(5)[part], mask[part])
        quality._compare(trainer, algorithm, torch.arange(5)[part], pseudo)
    quality.on_pictures(trainer, None, is_last)
    path = tmp_path / "pseudo_label_confusion_matrix.csv"
    assert path.exists() == (every == 4 or (every == 3 and is_last))
    if path.exists():
        assert path.read_text() == "true class,a,b,c\na,1,0,0\nb,0,1,0\nc,0,1,0\n"
