"""Metrics of an evaluation: values, names, ranks, and what watches them."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassCohenKappa, MulticlassROC

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.metrics.evaluation import EvaluationMetrics, scalars
from lightning_fedssl.storage import checkpoint_file
from tests.toy import ToyData, forked, toy_semifl, toy_trainer

ALL: list[Any] = ["macro_f1", "recall", "auroc", "calibration_error", "confusion_matrix", MulticlassCohenKappa]
LABELS = torch.tensor([0, 0, 1, 2, 2, 2])


def logits_for(predicted: Tensor) -> Tensor:
    """Logits of log 8, log 1, log 1: the predicted class has probability 0.8."""
    return torch.full((len(predicted), 3), 0.0).scatter(1, predicted[:, None], torch.tensor(8.0).log().item())


def one_rank(value: Any) -> list[Any]:
    return [value]


class LastLabel(Metric):
    """A metric that depends on the order of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.tensor(-1))

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        self.last = labels[-1]

    def compute(self) -> Any:
        return self.last


def test_values_computed_by_hand() -> None:
    """Predictions 0 1 1 2 2 0 for labels 0 0 1 2 2 2."""
    metrics = EvaluationMetrics(ALL, 3)
    predicted = torch.tensor([0, 1, 1, 2, 2, 0])
    for part in (slice(0, 4), slice(4, 6)):
        metrics.update(logits_for(predicted[part]), LABELS[part])
    values = metrics.compute(one_rank)
    assert values["confusion_matrix"].tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 2]]
    found = scalars(values)
    assert found["accuracy"] == 4 / 6
    recalls = [found[f"recall/class_{k}"] for k in range(3)]
    assert recalls == pytest.approx([1 / 2, 1, 2 / 3])
    assert found["macro_f1"] == pytest.approx((1 / 2 + 2 / 3 + 4 / 5) / 3)  # precisions 1/2, 1/2, 1
    assert found["calibration_error"] == pytest.approx(0.8 - 4 / 6)
    chance = (2 * 2 + 1 * 2 + 3 * 2) / 36
    assert found["cohen_kappa"] == pytest.approx((4 / 6 - chance) / (1 - chance))
    assert "confusion_matrix" not in found
    # One against the rest with probabilities 0.8 and 0.1: (1 + recall - false positive rate) / 2.
    areas = [(1 + 1 / 2 - 1 / 4) / 2, (1 + 1 - 1 / 5) / 2, (1 + 2 / 3 - 0) / 2]
    assert found["auroc"] == pytest.approx(sum(areas) / 3)


def test_three_ranks_give_the_bits_of_one() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(n, 3, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (9, 9, 9, 4)
    ]
    chosen = [*ALL, LastLabel]
    alone = EvaluationMetrics(chosen, 3)
    for batch in batches:
        alone.update(*batch)
    expected = alone.compute(one_rank)
    ranks = [EvaluationMetrics(chosen, 3, ranks=3) for _ in range(3)]
    for index, batch in enumerate(batches):
        ranks[index % 3].update(*batch)
    shares = [rank._batches for rank in ranks]
    for rank in ranks:
        values = rank.compute(lambda mine: shares)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_an_evaluation_without_logits_has_no_metrics() -> None:
    assert EvaluationMetrics(["macro_f1"], 3).compute(one_rank) == {}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["macro_f1", "macro_f1"], "two metrics have the name macro_f1"),
        ([partial(MulticlassCohenKappa, threshold=1)], "MulticlassCohenKappa cannot be made"),
        (
            ["f1"],
            "there is no metric 'f1'; give a list of macro_f1, recall, auroc, calibration_error, confusion_matrix",
        ),
    ],
)
def test_a_wrong_choice_is_refused(chosen: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationMetrics(chosen, 3)


def test_a_wrong_choice_is_refused_before_the_first_round(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, metrics=["macro_f1", "macro_f1"])
    with pytest.raises(ValueError, match="two metrics have the name macro_f1"):
        trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 0
    assert not list(tmp_path.iterdir())


def test_a_metric_whose_value_is_a_curve_is_refused_by_name() -> None:
    metrics = EvaluationMetrics([MulticlassROC], 3)
    metrics.update(torch.eye(3), torch.arange(3))
    with pytest.raises(ValueError, match=r"trainer\.metrics: the value of roc is not a number, a vector or a matrix"):
        metrics.compute(one_rank)


def test_classes_without_a_sample_are_left_out() -> None:
    """A perfect classifier of three classes, of which the last does not occur."""
    metrics = EvaluationMetrics(["auroc", "recall", "macro_f1"], 3)
    metrics.update(8 * torch.eye(3)[[0, 1, 0, 1]], torch.tensor([0, 1, 0, 1]))
    values = metrics.compute(one_rank)
    assert values["auroc"] == 1.0
    assert values["recall"][:2].tolist() == [1.0, 1.0]
    assert values["recall"][2].isnan()
    found = scalars(values)
    assert "recall/class_2" not in found
    assert found["recall/class_1"] == found["macro_f1"] == 1.0


@pytest.mark.parametrize("num_classes", [2, 3])
def test_auroc_of_samples_of_one_class_is_left_out(num_classes: int) -> None:
    metrics = EvaluationMetrics(["auroc", "macro_f1"], num_classes)
    metrics.update(8 * torch.eye(num_classes)[[1, 1, 0]], torch.tensor([1, 1, 1]))
    with pytest.warns(UserWarning, match="auroc is left out, because all evaluated samples have one class"):
        values = metrics.compute(one_rank)
    assert sorted(values) == ["accuracy", "largest_class_share", "macro_f1"]


def test_a_run_logs_and_watches_them(tmp_path: Path) -> None:
    callbacks = [
        FederatedCheckpoint(monitor="val/recall/class_1"),
        EarlyStopping(monitor="val/macro_f1", mode="max", patience=1, stopping_threshold=0.0),
    ]
    trainer = toy_trainer(tmp_path, metrics=[*ALL, LastLabel], callbacks=callbacks)
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 1  # the threshold is passed at once
    names = {"macro_f1", "auroc", "calibration_error", "cohen_kappa", "last_label", "recall/class_2"}
    assert {f"{stage}/{name}" for stage in ("val", "test") for name in names} <= trainer.callback_metrics.keys()
    folder = Path(str(trainer.log_dir))
    best = checkpoint_file.load(folder / "checkpoints/best.ckpt")
    assert best["metrics"]["val/recall/class_1"] == float(trainer.callback_metrics["val/recall/class_1"])
    matrices = json.loads((folder / "result.json").read_text())["matrices"]
    assert matrices.keys() == {"val/confusion_matrix", "test/confusion_matrix"}
    matrix = torch.tensor(matrices["test/confusion_matrix"])
    assert matrix.sum() == 60
    accuracy = float(trainer.callback_metrics["test/accuracy"])
    assert float(matrix.diagonal().sum() / 60) == pytest.approx(accuracy)


def test_two_ranks_log_the_metrics_of_one(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        trainer = toy_trainer(tmp_path / str(ranks), max_rounds=1, precision="64-true", metrics=ALL, **forked(ranks))
        trainer.fit(toy_semifl(), ToyData(eval_batch_size=7))
        found.append({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(("val/", "test/"))})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, abs=1e-9), name


class NoLoss(SemiFL):
    """Evaluates without a loss."""

    def _evaluation_step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits


class OwnScore(SemiFL):
    """Evaluates with a scalar of its own, and returns no logits to compute other metrics of."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/score", 0.5)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/score", 0.5)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (NoLoss, r"after round 1: test accuracy \d+\.\d\d% \(\d+ of 60 images, standard error \d images\)$"),
        (OwnScore, r"after round 1: test[ /]score 0.5"),
    ],
)
def test_a_method_need_not_have_a_loss_or_an_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: type[SemiFL], expected: str
) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, metrics=["confusion_matrix"], enable_progress_bar=True)
    trainer.fit(method(**dict(toy_semifl().hparams)), ToyData())
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("after round")]
    assert [bool(re.match(expected, line)) for line in printed] == [True]
    assert sum(v.dim() == 2 for v in trainer.run.scalars.metrics.values()) == (2 if method is NoLoss else 0)
