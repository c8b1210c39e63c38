from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedssl.callbacks import CollapseDetector
from lightning_fedssl.task import Classification, Segmentation, Task
from tests.algorithms.helpers import toy_rgd
from tests.toy import ToyData, toy_trainer

ONE_CLASS = Classification()
VAL = ("val/largest_class_share", "val/accuracy")


def warnings(
    caplog: pytest.LogCaptureFixture,
    course: list[dict[str, float]],
    images: int = 200,
    method: Any = None,
    task: Task = ONE_CLASS,
    **kwargs: Any,
) -> list[str]:
    """What a detector warns of when it sees these scalars, round by round."""
    detector = CollapseDetector(**kwargs)
    with caplog.at_level(logging.WARNING):
        for number, metrics in enumerate(course, start=1):
            data = SimpleNamespace(validation_labels=range(images), task=task)
            trainer = SimpleNamespace(round_index=number, is_global_zero=True, datamodule=data)
            detector.on_round_end(trainer, method, metrics)  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records]


def rounds(*values: tuple[float, float], names: tuple[str, str] = VAL) -> list[dict[str, float]]:
    return [dict(zip(names, pair, strict=True)) for pair in values]


def test_a_collapse_is_named_once_and_again_after_a_recovery(caplog: pytest.LogCaptureFixture) -> None:
    dead, alive = (0.99, 0.1), (0.2, 0.7)
    found = warnings(caplog, rounds(dead, dead, dead, dead, alive, dead, dead), patience=2)
    assert [message.split(":")[0] for message in found] == ["round 2", "round 7"]
    assert "one class has 99 % of the global model's predictions on the validation data, of which 10 %" in found[0]


@pytest.mark.parametrize(
    ("share", "accuracy"),
    [(0.94, 0.1), (1.0, 0.6)],
    ids=["several classes", "one class, rightly: all images are of that class"],
)
def test_no_collapse_is_named(caplog: pytest.LogCaptureFixture, share: float, accuracy: float) -> None:
    assert warnings(caplog, rounds(*[(share, accuracy)] * 9)) == []


def test_most_pixels_may_be_background(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(caplog, [{"pseudo_label/largest_class_share": 0.99}] * 9, task=Segmentation())


def test_rounds_without_a_measurement_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    course = rounds((1.0, 0.1))
    assert warnings(caplog, [*course, {}, *course, {}], patience=3) == []
    assert len(warnings(caplog, [*course, {}, *course, {}, *course], patience=3)) == 1


@pytest.mark.parametrize(("labels", "expected"), [(1, 0), (19, 0), (20, 1)])
def test_few_confident_labels_of_one_class_are_no_collapse(
    caplog: pytest.LogCaptureFixture, labels: int, expected: int
) -> None:
    names = ("pseudo_label/largest_class_share", "pseudo_label/confident_accuracy")
    course = [metrics | {"pseudo_label/confident_count": labels} for metrics in rounds(*[(1.0, 0.0)] * 5, names=names)]
    assert len(warnings(caplog, course)) == expected


def test_labels_of_one_class_are_named_where_nobody_knows_how_many_are_right(caplog: pytest.LogCaptureFixture) -> None:
    """The true labels of the clients' samples exist in simulations alone."""
    course = [{"pseudo_label/largest_class_share": 0.97, "pseudo_label/confident_count": 40.0}] * 5
    (found,) = warnings(caplog, course)
    assert "97 % of the confident pseudo-labels, and how many are right is unknown" in found
    assert "has probably collapsed" in found


def test_a_resumed_run_counts_on() -> None:
    data = SimpleNamespace(task=ONE_CLASS)
    detector, trainer = CollapseDetector(), SimpleNamespace(round_index=1, is_global_zero=True, datamodule=data)
    detector.on_round_end(trainer, None, rounds((1.0, 0.1))[0])  # type: ignore[arg-type]
    resumed = CollapseDetector()
    resumed.load_state_dict(detector.state_dict())
    assert resumed.state_dict() == detector.state_dict() == {"seen": {VAL[0]: 1}, "peaks": {}}


class Constant(nn.Module):
    """One logit per class, the same for every image: it predicts one class."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 5.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), 3) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_a_run_of_a_dead_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Users whose labels are all of class 1, a third of them right; the network cannot do better."""
    algorithm = toy_rgd(network=Constant, threshold=0.5, server_votes=0.001)
    trainer = toy_trainer(tmp_path, clients_per_round=4, callbacks=CollapseDetector(patience=3))
    with caplog.at_level(logging.WARNING):
        trainer.fit(algorithm, ToyData())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in ("val", "test", "group", "pseudo_label"):
        assert metrics[f"{name}/largest_class_share"] == 1
    assert metrics["group/accuracy_min"] == metrics["val/accuracy"]
    subjects = ("of the confident pseudo-labels", "of one group's predictions", "of the global model's predictions")
    for subject in subjects:
        assert sum(f"one class has 100 % {subject}" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("scalar", "good", "bad"), [("server/loss", 0.3, 1.3), ("client/mask_rate", 0.6, 0.2), ("val/accuracy", 0.8, 0.6)]
)
def test_a_course_that_gets_worse_is_named_once_after_three_rounds(
    caplog: pytest.LogCaptureFixture, scalar: str, good: float, bad: float
) -> None:
    course = [{"client/mask_rate": 0.4, scalar: value} for value in (good, bad, bad, good, bad, bad, bad, bad, good)]
    found = warnings(caplog, course)
    assert len(found) == 1
    assert found[0].startswith(f"round 7: {scalar} was {good:.2f} in round ")
    assert "model." in found[0]


def test_a_course_is_not_named_without_pseudo_labels_or_where_it_gets_better(caplog: pytest.LogCaptureFixture) -> None:
    worse = [{"server/loss": loss, "val/accuracy": 0.8} for loss in (0.3, 1.3, 1.3, 1.3)]
    better = [{"client/mask_rate": rate, "server/loss": 1 - rate} for rate in (0.1, 0.5, 0.8, 0.9)]
    assert warnings(caplog, worse) == warnings(caplog, better) == []


@pytest.mark.parametrize(
    ("scalars", "round_index", "expected"),
    [
        ({"val/accuracy": 0.4}, 1, 1),
        ({"val/accuracy": 0.9}, 1, 0),
        ({"val/accuracy": 0.4}, 4, 0),
        ({"server/loss": 1.1}, 1, 1),
        ({"server/loss": 0.2}, 1, 0),
    ],
)
def test_confident_labels_of_an_untrained_model_are_named(
    caplog: pytest.LogCaptureFixture, scalars: dict[str, float], round_index: int, expected: int
) -> None:
    course: list[dict[str, float]] = [{}] * (round_index - 1) + [{"client/mask_rate": 0.7, **scalars}]
    assert len(warnings(caplog, course)) == expected


def test_confident_labels_are_not_named_where_the_threshold_adapts(caplog: pytest.LogCaptureFixture) -> None:
    course = [{"client/mask_rate": 0.7, "val/accuracy": 0.4}]
    assert not warnings(caplog, course, method=SimpleNamespace(adaptive_threshold=True))
    assert warnings(caplog, course, method=SimpleNamespace(adaptive_threshold=False))


@pytest.mark.parametrize(("images", "expected"), [(20, 0), (200, 1)])
def test_a_decline_on_few_validation_images_is_not_named(
    caplog: pytest.LogCaptureFixture, images: int, expected: int
) -> None:
    course = [{"client/mask_rate": 0.4, "val/accuracy": accuracy} for accuracy in (0.7, 0.55, 0.55, 0.55)]
    assert len(warnings(caplog, course, images)) == expected
