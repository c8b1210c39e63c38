from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedssl.callbacks import CollapseDetector, collapse_detector
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
) -> list[str]:
    """What a detector warns of when it sees these scalars, round by round."""
    detector = CollapseDetector()
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
    found = warnings(caplog, rounds(*[dead] * 7, alive, *[dead] * 5))
    assert [message.split(":")[0] for message in found] == ["round 5", "round 13"]
    assert "one class has 99 % of the global model's predictions on the validation data, of which 10 %" in found[0]


DEAD, SURE = rounds((1.0, 0.1)), {"client/mask_rate": 0.7}
UNTRAINED = [SURE | {"val/accuracy": 0.4}]
DECLINES: Any = [{"client/mask_rate": 0.4, "val/accuracy": value} for value in (0.7, 0.55, 0.55, 0.55)]


def of_labels(count: int) -> list[dict[str, float]]:
    names = ("pseudo_label/largest_class_share", "pseudo_label/confident_accuracy")
    return [metrics | {"pseudo_label/confident_count": count} for metrics in rounds(*[(1.0, 0.0)] * 5, names=names)]


@pytest.mark.parametrize(
    ("course", "options", "expected"),
    [
        (rounds(*[(0.94, 0.1)] * 9), {}, 0),  # several classes
        (rounds(*[(1.0, 0.6)] * 9), {}, 0),  # one class, rightly: all images are of that class
        ([{"pseudo_label/largest_class_share": 0.99}] * 9, {"task": Segmentation()}, 0),  # most pixels are background
        ([*DEAD * 3, {}, *DEAD, {}], {}, 0),  # rounds without a measurement do not count
        ([*DEAD * 3, {}, *DEAD, {}, *DEAD], {}, 1),
        (of_labels(19), {}, 0),  # few confident labels
        (of_labels(20), {}, 1),
        ([{"server/loss": loss, "val/accuracy": 0.8} for loss in (0.3, 1.3, 1.3, 1.3)], {}, 0),  # no pseudo-labels
        ([{"client/mask_rate": rate, "server/loss": 1 - rate} for rate in (0.1, 0.5, 0.8, 0.9)], {}, 0),  # better
        (DECLINES, {"images": 20}, 0),  # few validation images
        (DEAD * 5, {"images": 19}, 0),
        (DECLINES, {"images": 200}, 1),
        (UNTRAINED, {}, 1),  # confident labels of an untrained model
        ([SURE | {"val/accuracy": 0.9}], {}, 0),
        ([{}, {}, {}, *UNTRAINED], {}, 0),
        ([SURE | {"server/loss": 1.1}], {}, 1),
        ([SURE | {"server/loss": 0.2}], {}, 0),
        (UNTRAINED, {"method": SimpleNamespace(adaptive_threshold=True)}, 0),
        (UNTRAINED, {"method": SimpleNamespace(adaptive_threshold=False)}, 1),
    ],
)
def test_what_is_named_and_what_is_not(
    caplog: pytest.LogCaptureFixture, course: list[dict[str, float]], options: dict[str, Any], expected: int
) -> None:
    assert len(warnings(caplog, course, **options)) == expected


def test_labels_of_one_class_are_named_where_nobody_knows_how_many_are_right(caplog: pytest.LogCaptureFixture) -> None:
    """The true labels of the clients' samples exist in simulations alone."""
    course = [{"pseudo_label/largest_class_share": 0.97, "pseudo_label/confident_count": 40.0}] * 5
    (found,) = warnings(caplog, course)
    assert "97 % of the confident pseudo-labels, and how many are right is unknown" in found
    assert "has probably collapsed" in found


def test_a_resumed_run_counts_on() -> None:
    data = SimpleNamespace(task=ONE_CLASS, validation_labels=range(99))
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


def test_a_run_of_a_dead_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users whose labels are all of class 1, a third of them right; the network cannot do better."""
    algorithm = toy_rgd(network=Constant, threshold=0.5, server_votes=0.001)
    monkeypatch.setattr(collapse_detector, "PATIENCE", 3)
    trainer = toy_trainer(tmp_path, clients_per_round=4)
    with caplog.at_level(logging.WARNING):
        trainer.fit(algorithm, ToyData(validation=0.25))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in ("val", "test", "pseudo_label"):
        assert metrics[f"{name}/largest_class_share"] == 1
    for subject in ("of the confident pseudo-labels", "of the global model's predictions"):
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
