"""What is predicted: targets, losses and labels of every task, by hand, and methods that train on them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC
from torchvision.transforms import v2

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FL2, SAGE, UDA, FedAvg, FedRGD, FixMatch, MeanTeacher, SemiFL, Supervised
from lightning_fedssl.callbacks import ClientEvaluation, LabelsAlone
from lightning_fedssl.data import FederatedDataModule, GaussianNoise, ImageTable, MaskFolders, Table
from lightning_fedssl.data.augment.views import make_views
from lightning_fedssl.data.image_files import read_mask
from lightning_fedssl.export import export, load_network
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.metrics.evaluation import EvaluationMetrics
from lightning_fedssl.models import MLP, UNet, build_network
from lightning_fedssl.state import Batch
from lightning_fedssl.task import Classification, MultiLabel, Regression, Segmentation, Task
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.updates import PseudoLabelPoison
from tests.toy import SPEC, ToyData, data_of, evaluated, images_of, network_of, sgd, toy_semifl, toy_trainer

LOG3 = math.log(3)
"""The logit of the probability 3/4."""


def logit_map(p: list[list[float]]) -> Tensor:
    """Logits (1, 2, height, width) of two classes, of which the second has the probability p at each pixel."""
    second = torch.tensor(p, dtype=torch.float64).logit()
    return torch.stack([torch.zeros_like(second), second])[None]


# Targets.


@pytest.mark.parametrize(
    ("task", "targets", "strata"),
    [
        (Classification(), torch.tensor([1, 0, -1]), [1, 0, -1]),
        # Class 1 is the rarest; the third sample has none, of the fourth nothing is known.
        (MultiLabel(), torch.tensor([[1, 1], [1, 0], [0, 0], [-1, -1], [1, -1]]), [1, 0, 2, -1, 0]),
        # Most frequent class but the background, only background, and no pixel that counts.
        (Segmentation(), torch.tensor([[[0, 0], [0, 1]], [[0, 0], [0, 0]], [[-1, -1], [-1, -1]]]), [1, 0, -1]),
        (Regression(bins=2), torch.tensor([[1.0], [9.0], [math.nan], [2.0], [8.0]]), [0, 1, -1, 0, 1]),
    ],
)
def test_a_partition_sees_each_sample_in_a_class(task: Task, targets: Tensor, strata: list[int]) -> None:
    found = task.strata(task.checked(targets, 1 if isinstance(task, Regression) else 2, "train", allow_missing=True), 2)
    assert found.tolist() == strata
    assert max(strata) < len(task.strata_names(["a", "b"]))


@pytest.mark.parametrize(
    ("task", "targets", "message"),
    [
        (Classification(), torch.zeros(3, 2), r"data\.task"),
        (MultiLabel(), torch.tensor([[0, 1], [0, 2]]), "needs 0 or 1 for each of 2 classes .* sample 1 has 2"),
        (MultiLabel(), torch.tensor([[0, -1], [-1, -1]]), "sample 1 has -1"),
        (Segmentation(), torch.full((2, 4, 4), -1), "no pixel of its masks has a class"),
        (MultiLabel(), torch.tensor([0, 1]), "needs 0 or 1"),
        (Segmentation(), torch.full((1, 2, 2), 2), "masks"),
        (Segmentation(), torch.zeros(4), "masks"),
        (Segmentation(class_weights=[1.0]), torch.zeros(1, 2, 2), "1 weights for 2 classes"),
        (Regression(), torch.tensor([[math.nan, 1.0]]), "2 finite numbers"),
    ],
)
def test_other_targets_are_refused(task: Task, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task.checked(targets, 2, "test")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Classification(class_weights=[0.0, 0.0]),
        lambda: Segmentation(class_weights=[math.nan, 1.0]),
        lambda: Regression(mean=math.nan),
        lambda: Regression(std=math.inf),
        lambda: data_of(Regression),  # type: ignore[arg-type]
    ],
)
def test_impossible_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.task"):
        make()


@pytest.mark.parametrize("weights", [np.array([0.2, 1.8]), torch.tensor([0.2, 1.8]), (0.2, 1.8)], ids=type)
def test_class_weights_are_a_sequence_of_any_kind(weights: Any) -> None:
    assert Segmentation(class_weights=weights).class_weights == pytest.approx([0.2, 1.8])
    with pytest.raises(ValueError, match=r"class_weights is .* in the order of the classes"):
        Classification(class_weights={"a": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (Classification(class_weights=[1.0, 9.0]), torch.randn(6, 2), torch.tensor([0, 0, 0, 0, 1, 1])),
        (Segmentation(), torch.randn(4, 2, 1, 3), torch.tensor([[[0, 1, 1]]] * 2 + [[[1, -1, -1]]] * 2)),
        (MultiLabel(), torch.randn(3, 2), torch.tensor([[1, 0], [1, -1], [0, -1]])),
        (Regression([5.0, 0.1], [9.0, 0.1]), torch.randn(3, 2), torch.randn(3, 2)),
    ],
)
def test_a_loss_of_batches_is_that_of_all(task: Task, outputs: Tensor, targets: Tensor) -> None:
    means, weights = [], []
    for x, y in zip(outputs.double().split(2), targets.split(2), strict=True):
        means.append(float(task.labeled_loss(x, y)))
        weights.append(float(task.labeled_weight(x, y)))
    assert np.average(means, weights=weights) == pytest.approx(float(task.labeled_loss(outputs.double(), targets)))


def test_several_numbers_have_a_unit_and_an_error_each() -> None:
    task = Regression(mean=[100.0, 2.0], std=[50.0, 1.0])
    targets = torch.tensor([[150.0, 2.0], [50.0, 4.0]])
    assert task.probabilities((targets - torch.tensor([100.0, 2.0])) / torch.tensor([50.0, 1.0])).equal(targets)
    assert task.entry_losses(torch.zeros(2, 2), targets).tolist() == [[1, 0], [1, 4]]
    metrics = EvaluationMetrics([], 2, task=task)
    metrics.update(torch.zeros(2, 2), targets)
    values = metrics.compute(lambda value: [value])
    assert values["mae_each"].tolist() == [50, 1]
    assert values["mae"] == 25.5
    assert not task.advice(targets)
    assert "the mean 100, 3 and the deviation 50, 1: give these" in Regression(std=100).advice(targets)
    with pytest.raises(ValueError, match="for 3 outputs; give one number for each"):
        task.checked(torch.zeros(2, 3), 3, "train")


def test_a_metric_that_fails_is_refused_before_the_first_round(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, metrics=[BinaryAUROC])
    with pytest.raises(ValueError, match=r"trainer.metrics: binary_auroc does not take .* Multiclass"):
        trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 0


class Probabilities(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


@pytest.mark.parametrize(("network", "named"), [(MLP, False), (Probabilities, True)])
def test_a_network_that_ends_in_a_softmax_is_named(
    tmp_path: Path, network: Any, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    toy_trainer(tmp_path, max_rounds=1).fit(toy_semifl(network=network), ToyData())
    assert ("leave such a last layer out" in caplog.text) == named


def test_what_training_targets_make_hard_is_said() -> None:
    targets = torch.tensor([[1000.0], [3000.0]])
    assert not Regression(mean=2000, std=1000).advice(targets)
    assert "have the mean 2e+03 and the deviation 1e+03" in Regression().advice(targets)
    assert not Regression().advice(targets[:1])  # one target has no deviation
    assert not Regression().advice(torch.zeros(2, 1))
    assert not Regression(std=[1, 1]).advice(torch.tensor([[1.0, 0], [-1, 0.1]]))  # each has a std of its own
    assert Regression().strata(torch.full((2, 1), math.nan), 1).tolist() == [-1, -1]
    rare = torch.tensor([[0, 1, 0]]).expand(20, 3)
    data = FederatedDataModule.from_datasets(
        (images_of(rare[:, 0], 0), rare), (images_of(rare[:, 0], 1), rare),
        task=MultiLabel(), weak="none", strong="none", num_clients=2, num_labels=4,
    )  # fmt: skip
    data.setup()
    warning = data.reading.warnings[0]
    assert "no training sample has the class 0, 2 (2 of 3 classes): it cannot be learned" in warning


# Losses and labels by hand.


def test_labels_are_independent_of_each_other() -> None:
    outputs = torch.tensor([[LOG3, -LOG3, 0.0]])
    task = MultiLabel()
    torch.testing.assert_close(task.probabilities(outputs), torch.tensor([[0.75, 0.25, 0.5]]))
    losses = task.entry_losses(outputs, torch.tensor([[1, 1, -1]]))
    torch.testing.assert_close(losses, torch.tensor([[math.log(4 / 3), math.log(4), 0.0]]))
    torch.testing.assert_close(task.loss(outputs, torch.tensor([[1, 1, -1]])), losses.sum() / 2)
    pseudo = task.label(outputs, 0.75)
    assert pseudo.labels.tolist() == [[1, 0, 1]]
    assert pseudo.mask.tolist() == [[True, True, False]]
    torch.testing.assert_close(task.consistency_loss(outputs, pseudo), torch.tensor(2 * math.log(4 / 3) / 3))
    assert task.confident_targets(pseudo).tolist() == [[1, 0, -1]]


def test_pixels_have_a_class_a_confidence_and_a_mask_each() -> None:
    outputs, task = logit_map([[0.75, 0.25], [0.5, 0.9]]), Segmentation()
    targets = torch.tensor([[[1, 1], [0, -1]]])
    losses = task.entry_losses(outputs, targets)
    expected = torch.tensor([[[math.log(4 / 3), math.log(4)], [math.log(2), 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(task.loss(outputs, targets), expected.sum() / 3)
    pseudo = task.label(outputs, 0.7)
    assert task.confident_targets(pseudo).tolist() == [[[1, 0], [-1, 1]]]
    sure = 2 * math.log(4 / 3) - math.log(0.9)
    torch.testing.assert_close(task.consistency_loss(outputs, pseudo), torch.tensor(sure / 4, dtype=torch.float64))


def test_numbers_are_compared_in_units_of_std() -> None:
    task = Regression(mean=10, std=2)
    outputs = torch.tensor([[1.0], [0.0]])
    assert task.probabilities(outputs).tolist() == [[12.0], [10.0]]
    assert task.loss(outputs, torch.tensor([[16.0], [math.nan]])).item() == 4  # (1 - 3)^2


def test_weights_and_smoothing_count_for_true_labels_alone() -> None:
    outputs, y = torch.tensor([[0.0, LOG3], [0.0, LOG3]]), torch.tensor([1, 0])
    wrong, right = math.log(4), math.log(4 / 3)
    weighted = Classification(class_weights=[3.0, 1.0])
    assert weighted.labeled_loss(outputs, y).item() == pytest.approx((right + 3 * wrong) / 4)
    assert weighted.loss(outputs, y).item() == pytest.approx((right + wrong) / 2)
    own = Classification([3.0, 1.0], criterion=partial(torch.nn.MultiMarginLoss, reduction="none"))
    assert own.labeled_loss(outputs, y).item() == pytest.approx((0 + 3 * (1 + LOG3) / 2) / 4)
    with pytest.raises(ValueError, match="criterion must return a loss for each label"):
        Classification(criterion=torch.nn.MultiMarginLoss).labeled_loss(outputs, y)
    for outputs_of_a_type in (outputs.double(), outputs.half()):
        for task in (weighted, Classification(label_smoothing=0.5)):
            assert task.labeled_loss(outputs_of_a_type, torch.tensor([-1, -1])) == 0
    smooth = Classification(label_smoothing=0.5).labeled_loss(outputs[:1], y[:1])
    assert smooth.item() == pytest.approx(0.75 * right + 0.25 * wrong)
    both = Classification([0.3, 1.7], label_smoothing=0.5)
    both.labeled_loss(outputs.bfloat16(), y)
    for exact in (outputs, outputs.double()):
        weights = torch.tensor([0.3, 1.7], dtype=exact.dtype)
        assert both.labeled_loss(exact, y) == F.cross_entropy(exact, y, weights, label_smoothing=0.5)


@pytest.mark.parametrize(
    ("task", "outputs", "labels", "frequency"),
    [
        (Classification(), torch.tensor([[0.0, LOG3], [0.0, -LOG3], [0.0, LOG3]]), torch.tensor([0, 1, 1]), None),
        (Segmentation(), logit_map([[0.75, 0.25, 0.75]]).float(), torch.tensor([[[0, 1, 1]]]), [5 / 7, 1, 1]),
        # Mean probability 7/12 of the label, 5/12 of its absence.
        (MultiLabel(), torch.tensor([[LOG3], [-LOG3], [LOG3]]), torch.tensor([[0], [1], [1]]), [5 / 7, 1, 1]),
    ],
)
def test_frequency_and_divergence(task: Task, outputs: Tensor, labels: Tensor, frequency: list[float] | None) -> None:
    p = task.probabilities(outputs)
    found = task.frequency(p, labels).flatten()
    torch.testing.assert_close(found, torch.tensor(frequency or [5 / 7, 1, 1]))
    # KL((1/4, 3/4) || (1/2, 1/2)), the same for each entry.
    kl = math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75)
    torch.testing.assert_close(task.divergences(torch.zeros_like(outputs), p).flatten(), torch.full((3,), kl))
    right, chance = task.true_probability(outputs, labels)
    torch.testing.assert_close(right.flatten(), torch.tensor([0.25, 0.25, 0.75]))
    assert chance == 0.5


@pytest.mark.parametrize(
    ("task", "output", "distance"),
    [
        (Classification(), [0.0, LOG3], 1 / 16),  # both classes are 1/4 away from the teacher's 1/2
        (MultiLabel(), [0.0, LOG3], 1 / 32),  # one label of two
        (Regression(std=3), [0.0, 2.0], 2.0),
    ],
)
def test_distance_of_two_predictions(task: Task, output: list[float], distance: float) -> None:
    found = task.distances(torch.tensor([output]), torch.zeros(1, 2))
    torch.testing.assert_close(found, torch.tensor([distance]))


def test_thresholds_of_fl2_are_of_each_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label needs the mean confidence, times how frequent its outcome is beside the other one."""
    algorithm, task = FL2(network=partial(nn.Identity), threshold=0.85), MultiLabel()
    data = data_of(task)
    data.setup()
    algorithm.task = task
    p = torch.tensor([[0.9, 0.2], [0.8, 0.4], [0.4, 0.1]])
    soft = PseudoLabels(p, torch.maximum(p, 1 - p), torch.maximum(p, 1 - p) >= 0.85)
    monkeypatch.setattr(algorithm, "label_images", lambda data: soft)
    local = data.local_data(0, 1)
    work = algorithm.on_client_start(replace(local, unlabeled=local.unlabeled[:3]))
    assert float(work.payload["status"]) == pytest.approx(4.6 / 6)
    assert work.pseudo_labels is not None
    # Label 0 is present 0.7, absent 0.3: thresholds 0.767 and 0.329. Label 1 is absent 0.767: threshold 0.767.
    assert work.pseudo_labels.mask.tolist() == [[True, True], [True, False], [True, True]]
    batch = work.batch(0)
    assert sorted(batch["y"].tolist()) == [[0, 0], [1, -1], [1, 0]]
    assert int(batch["sure"].sum()) == 2


# Metrics.


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "expected"),
    [
        # Two of three pixels that count are right: IoU 1/2 of each class, Dice 2/3.
        (Segmentation(), logit_map([[0.9, 0.9, 0.1, 0.1]]), torch.tensor([[[1, 0, 0, -1]]]),
         {"iou": 0.5, "dice": 2 / 3}),
        # Class 0 is ranked right; of class 1 the positive is the second of two: precision 1/2.
        (MultiLabel(), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1, 0], [0, 1]]),
         {"average_precision": 0.75, "f1": 0.5}),
        # No sample has class 1, or it is not known whether one has: it is in no mean.
        (MultiLabel(), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1, 0], [0, 0]]),
         {"average_precision": 1.0, "f1": 1.0}),
        (MultiLabel(), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1, -1], [0, -1]]),
         {"average_precision": 1.0, "f1": 1.0}),
        (MultiLabel(), torch.tensor([[1.0, 1.0]]), torch.tensor([[0, 0]]),
         {"average_precision": math.nan, "f1": math.nan}),
        (Regression(mean=1), torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]]), {"mae": 1.0, "r2": 0.5}),
        (Regression(), torch.tensor([[0.0]]), torch.tensor([[1.0]]), {"mae": 1.0, "r2": math.nan}),
    ],
)  # fmt: skip
def test_metrics_by_hand(task: Task, outputs: Tensor, targets: Tensor, expected: dict[str, float]) -> None:
    metrics = EvaluationMetrics([], 1 if isinstance(task, Regression) else 2, task=task)
    metrics.update(outputs, targets)
    found = metrics.compute(lambda value: [value])
    assert {name: pytest.approx(value, nan_ok=True) for name, value in expected.items()} == {
        k: float(v) for k, v in found.items() if v.dim() == 0
    }
    if not isinstance(task, Classification):
        with pytest.raises(ValueError, match="auroc is for Classification"):
            EvaluationMetrics(["auroc"], 2, task=task)


def test_the_numbers_with_the_largest_errors_come_first() -> None:
    metrics = EvaluationMetrics([], 2, task=Regression())
    targets = torch.zeros(700, 2)
    targets[:600] = 1
    targets[5, 1], targets[9, 0] = 3, -2
    metrics.update(torch.zeros(700, 2), targets)
    found = metrics.compute(lambda value: [value])["largest_errors"]
    assert found[:2].tolist() == [[2 * 5 + 1, 3, 0], [2 * 9, -2, 0]]
    assert len(found[:, 0].unique()) == 500
    assert (found[:, 1] == 0).sum() == pytest.approx(500 / 7, abs=2), "the small errors have their share"


# Views.


def test_weak_views_move_masks_and_strong_views_move_nothing_more() -> None:
    """The image is its own mask: after any weak view they are still equal; a strong view has the same geometry."""
    images = images_of(torch.arange(30) % 3, 3)
    mask, keys = images[:, 0].long(), torch.arange(30)
    views = make_views(SPEC, "flip_crop", "digits", per_pixel=True)
    assert views.target is not None
    shown = views.weak(images, keys)[:, 0] * 255 * 0.25 + 255 * 0.5
    moved = views.target(mask, keys)
    torch.testing.assert_close(shown.round().long(), moved)
    assert (moved != mask).any()
    # Two colours survive most photometric operations as two; their places are those of the weak view.
    halves = torch.where(torch.arange(8) < 3, 40, 200).to(torch.uint8).expand(30, 1, 8, 8)
    strong, weak = views.strong(halves, keys)[:, 0], views.weak(halves, keys)[:, 0]
    bright = strong > (strong.amin((1, 2)) + strong.amax((1, 2)))[:, None, None] / 2
    same = (bright == (weak > 0)).double().mean((1, 2))
    assert (same > 0.85).sum() >= 25  # a cutout hides a part of some


# Methods.


AT_CLIENTS = (FedAvg, MeanTeacher)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written to the present folder."""
    monkeypatch.chdir(tmp_path)


def trained(method: type[FederatedAlgorithm], task: Task, trainer: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    at = "clients" if method in AT_CLIENTS else "server"
    of_method = {Supervised: {"server_epochs": 2}, FedRGD: {"local_steps": 3}, FL2: {"pretrain_epochs": 1}}
    few: dict[str, Any] = of_method.get(method, {"client_epochs": 1})
    algorithm = method(network=network_of(task), optimizer=sgd, **few | kwargs)
    settings: dict[str, Any] = {"max_rounds": 2, "clients_per_round": 2, "logger": False, "accelerator": "cpu"}
    run = FederatedTrainer(**settings | (trainer or {}))
    run.fit(algorithm, data_of(task, label_location=at))
    return run


@pytest.mark.parametrize("task", [MultiLabel(), Segmentation(), Regression()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("method", [FedAvg, Supervised, FixMatch, UDA, SemiFL, FL2, FedRGD, MeanTeacher])
def test_methods_train_on_other_tasks(method: type[FederatedAlgorithm], task: Task) -> None:
    if method.needs not in task.gives:
        with pytest.raises(
            ValueError, match=rf"data\.task: {method.__name__} cannot train on Regression; .*Supervised \(server\)"
        ):
            trained(method, task)
        return
    run = trained(method, task)
    values = run.callback_metrics
    assert {f"val/{name}" for name in ("loss", *task.metrics[:2])} <= values.keys()
    assert all(math.isfinite(float(value)) for value in values.values())


class Uncertain(Regression):
    """Numbers of which the network predicts the variance, too: mean and log-variance of each."""

    gives = ("loss", "confidence")

    def output_shape(self, num_classes: int, in_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (2 * num_classes,)

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_variance = outputs.chunk(2, dim=1)
        return 0.5 * (log_variance + (mean - targets.nan_to_num()).square() / log_variance.exp()) * self.known(targets)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return super().probabilities(outputs.chunk(2, dim=1)[0])

    def label(self, outputs: Tensor, threshold: float, *, soft: bool = False) -> PseudoLabels:
        mean, log_variance = outputs.chunk(2, dim=1)
        confidence = torch.sigmoid(1 - log_variance)
        return PseudoLabels(mean, confidence, confidence >= threshold)


@pytest.mark.parametrize("method", [FixMatch, SemiFL])
def test_numbers_with_a_variance_have_pseudo_labels(method: type[FederatedAlgorithm]) -> None:
    values = trained(method, Uncertain(), threshold=0.5).callback_metrics
    assert 0 < float(values["client/mask_rate"]) <= 1
    assert math.isfinite(float(values["test/mae"]))
    assert not any(name.startswith("pseudo_label/") for name in values)  # a number is not right or wrong
    with pytest.raises(ValueError, match=r"data\.task: UDA cannot train on Uncertain"):
        trained(UDA, Uncertain())


def test_a_task_defines_what_it_says_that_it_gives() -> None:
    for gives, missing in {"confidence": "label", "classes": "hard"}.items():
        with pytest.raises(TypeError, match=f"does not define {missing}"):
            type("Incomplete", (Regression,), {"gives": ("loss", gives)})


def test_a_method_that_has_not_declared_the_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.task: SAGE cannot train on MultiLabel; .*FixMatch"):
        trained(SAGE, MultiLabel())


@pytest.mark.parametrize("task", [MultiLabel(), Segmentation()], ids=lambda task: type(task).__name__)
def test_labels_teach(task: Task) -> None:
    run = trained(Supervised, task, {"max_rounds": 25})
    assert float(run.callback_metrics[f"val/{task.monitor}"]) > 0.8


def test_mixed_labels_of_semifl_by_hand() -> None:
    """Ratio 1/4 of the first label's loss, of which one is not confident, and 3/4 of the other's."""
    algorithm = SemiFL(network=partial(nn.Identity), num_classes=2, in_shape=(2,))
    algorithm.task, algorithm.network = MultiLabel(), nn.Identity()
    z = torch.tensor([[LOG3, 0.0]])
    batch: Batch = {
        "x_strong": z, "x_weak": z, "x_mix": z, "y_fix": torch.tensor([[1, -1]]), "y_mix": torch.tensor([[0, 1]]),
        "ratio": torch.tensor([0.25]),
    }  # fmt: skip
    right, wrong, blind = math.log(4 / 3), math.log(4), math.log(2)
    loss = algorithm.training_step(batch, 0)
    assert loss is not None
    assert loss.item() == pytest.approx(right + (0.25 * right + 0.75 * wrong + 0.75 * blind) / 2, rel=1e-6)


def test_annealing_of_uda_leaves_out_single_labels() -> None:
    """At the start of a run a label is learned while its probability is at most that of a guess, 1/2."""
    algorithm = UDA(network=partial(nn.Identity))
    algorithm.task, algorithm.released = MultiLabel(), 0.0
    loss = algorithm.labeled_loss(torch.tensor([[LOG3, -LOG3]]), torch.tensor([[1, 1]]))
    assert loss.item() == pytest.approx(math.log(4))
    pseudo = PseudoLabels(torch.tensor([[0.75, 0.5]]), torch.zeros(1, 2), torch.tensor([[True, False]]))
    kl = math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75)
    assert algorithm.unlabeled_loss(torch.zeros(1, 2), pseudo).item() == pytest.approx(kl / 2)


def test_pseudo_labels_of_pixels_lie_where_their_image_lies() -> None:
    """SemiFL labels plain images; the moved labels must be those of the moved pixels."""
    task = Segmentation()
    data = data_of(task, label_location="server")
    algorithm = SemiFL(network=network_of(task), optimizer=sgd, threshold=0.0, num_classes=2, in_shape=(1, 8, 8))
    data.setup()
    algorithm.task = task
    algorithm.configure_model()
    local = data.local_data(0, 1)

    def seen(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), x], dim=1)

    algorithm.forward = seen  # type: ignore[method-assign]
    batch = algorithm.on_client_start(local).batch(0)
    assert torch.equal((batch["x_weak"] > 0).squeeze(1).long(), batch["y_fix"])
    assert F.cross_entropy(seen(batch["x_weak"]), batch["y_fix"]).isfinite()


# Readers, files and models.


def mask_folders(root: Path) -> None:
    """Pictures of 12 x 8 pixels with a bright half, and masks of 0 and 255; one training image has none."""
    pixels = np.zeros((8, 12, 3), np.uint8)
    for part, count in (("train", 12), ("test", 4)):
        for k in range(count):
            image, mask = pixels + k, np.zeros((8, 12), np.uint8)
            image[:, 2 + k % 4 :], mask[:, 2 + k % 4 :] = 200, 255
            for kind, values in (("images", image), ("masks", mask)):
                (root / part / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(root / part / kind / f"p{k:02}.png")
    (root / "train/masks/p11.png").unlink()


def test_masks_in_folders_fit_their_images(tmp_path: Path) -> None:
    mask_folders(tmp_path)
    (tmp_path / "train/masks/p11.heic").touch()
    (tmp_path / "train").rename(tmp_path / "Train")
    source = MaskFolders(str(tmp_path), 8, ["ground", "bright"])
    spec, train, test, _ = source.load()
    assert (spec.num_classes, spec.class_names, len(train.images)) == (2, ("ground", "bright"), 12)
    assert "left out: .heic (1)" in source.reading.warnings[0]
    assert (train.labels[-1] == -1).all()
    for images, masks in ((train.images[:11], train.labels[:11]), (test.images, test.labels)):
        assert torch.equal((images[:, 0] > 100).long(), masks)
    # The picture is cropped to columns 2 to 9; of the first the whole square is bright.
    assert [int((mask == 0).sum()) for mask in test.labels] == [0, 8, 16, 24]
    Image.fromarray(np.full((8, 12), 7, np.uint8)).save(tmp_path / "test/masks/p00.png")
    with pytest.raises(ValueError, match=r"p00\.png' has the value 7, and there are 3 class_names"):
        MaskFolders(str(tmp_path), 8, ["a", "b", "c"]).load()
    border = np.zeros((8, 12), np.uint8)
    border[:, 4:6], border[:, 6:] = 255, 1
    Image.fromarray(border).save(tmp_path / "test/masks/p00.png")
    assert source.load().test.labels[0, 0].tolist() == [0, 0, -1, -1, 1, 1, 1, 1]
    nothing = np.where(border == 1, 0, border)  # beside that border, 255 is no object here either
    Image.fromarray(nothing).save(tmp_path / "test/masks/p01.png")
    assert source.load().test.labels[1, 0].tolist() == [0, 0, -1, -1, 0, 0, 0, 0]
    border[0, 4] = 3  # of a border that was smoothed
    Image.fromarray(border).save(tmp_path / "test/masks/p00.png")
    with pytest.raises(ValueError, match="has the value 3, and there are 2 class_names"):
        source.load()
    Image.fromarray(border).save(tmp_path / "mask.jpg")
    with pytest.raises(ValueError, match="unlike JPEG"):
        read_mask(tmp_path / "mask.jpg", 8, tmp_path / "test/images/p00.png")
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(tmp_path / "test/masks/p00.png")  # half as large
    assert not source.load().test.labels[0].any()
    turned = Image.fromarray(np.zeros((12, 8, 3), np.uint8))
    exif = turned.getexif()
    exif[ExifTags.Base.Orientation] = 6
    for k, kind in enumerate(("jpg", "tiff")):  # Pillow turns the size of one when it is opened, of the other later
        turned.save(tmp_path / f"turned.{kind}", exif=exif)
        larger = np.full((8 * 7 + 4 * k, 12 * 7), 255, np.uint8)  # 4 are lost where the image's side is rounded
        Image.fromarray(larger).save(tmp_path / "mask.png")
        assert read_mask(tmp_path / "mask.png", 8, tmp_path / f"turned.{kind}").all()
    Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(tmp_path / "damaged.png", exif=b"Exif\0\0no TIFF")
    assert read_mask(tmp_path / "test/masks/p00.png", 8, tmp_path / "damaged.png").sum() == 0
    Image.fromarray(np.zeros((12, 8), np.uint8)).save(tmp_path / "test/masks/p00.png")
    with pytest.raises(
        ValueError, match=r"p00\.png' is not a readable mask \(8 x 12 pixels, and its image .* has 12 x 8\)"
    ):
        source.load()
    (tmp_path / "test/masks/p00.png").unlink()
    with pytest.raises(FileNotFoundError, match="has no mask of its name"):
        MaskFolders(str(tmp_path), 8, ["ground", "bright"]).load()


def test_a_mask_is_in_the_folder_of_its_image(tmp_path: Path) -> None:
    mask_folders(tmp_path / "a")
    for k, site in enumerate(("east", "west")):  # whose images have the same names
        mask_folders(tmp_path / "b")
        for part in ("train", "test"):
            for kind, name in (("images", "p00"), ("masks", f"p0{k}")):
                target = tmp_path / "a" / part / kind / site / "p00.png"
                target.parent.mkdir(parents=True)
                (tmp_path / "b" / part / kind / f"{name}.png").rename(target)
    source = MaskFolders(str(tmp_path / "a"), 8, ["ground", "bright"])
    train = source.load().train
    found = dict(zip(train.files, train.labels, strict=True))
    assert torch.equal(found["train/images/east/p00.png"], found["train/images/p00.png"])
    assert torch.equal(found["train/images/west/p00.png"], found["train/images/p01.png"])
    (tmp_path / "a/test/masks/west/p00.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"give masks/west/p00\.png"):
        MaskFolders(str(tmp_path / "a"), 8, ["ground", "bright"]).load()


@pytest.mark.parametrize(("value", "named"), [(1, False), (255, False), (2, True)])
def test_values_of_masks_are_printed(tmp_path: Path, value: int, named: bool) -> None:
    mask_folders(tmp_path)
    for path in tmp_path.glob("*/masks/*.png"):
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8) * value).save(path)
    source = MaskFolders(str(tmp_path), 8, ["ground", "bright"])
    source.load()
    assert source.reading.facts["mask values"] == f"0, {value}"
    assert any("every value above 0 is 'bright'" in text for text in source.reading.warnings) == named


def test_predicted_masks_have_the_size_of_their_images(tmp_path: Path) -> None:
    """Of 12 x 8 pixels the square of 8 x 8 in the middle is predicted, at 4 x 4."""
    mask_folders(tmp_path / "data")
    source = MaskFolders(str(tmp_path / "data"), 4, ["ground", "bright"])
    given: dict[str, Any] = {"num_clients": 2, "num_labels": "all", "validation": 0, "weak": "none", "strong": "none"}
    data = FederatedDataModule(source, task=Segmentation(), **given)
    method = Supervised(network=network_of(Segmentation()), optimizer=sgd)
    trainer = FederatedTrainer(max_rounds=1, accelerator="cpu", default_root_dir=tmp_path)
    trainer.fit(method, data)
    predicted = trainer.predict(method, data)
    found = np.asarray(Image.open(Path(str(trainer.predictions_file)) / "test/images/p03.png"))
    assert found.shape == (8, 12)
    assert (found[:, [0, 1, 10, 11]] == 255).all()
    square = torch.cat([*predicted])[3].argmax(0).numpy().repeat(2, axis=0).repeat(2, axis=1)
    assert np.array_equal(found[:, 2:10], square)


def blurred(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1)


@pytest.mark.parametrize(
    ("strong", "moves"),
    [
        (v2.RandomHorizontalFlip(0.5), True),
        (v2.RandomRotation([20, 40]), True),
        (lambda x: x.roll(1, dims=-1), True),
        (lambda x: x.flip(-2), True),
        (v2.ColorJitter(0.5, 0.5, 0.5, 0.2), False),
        (v2.RandomInvert(0.5), False),
        (v2.RandomSolarize(0.5, 1.0), False),
        (v2.RandomErasing(1.0, (0.2, 0.3)), False),
        (v2.GaussianBlur(5, (1.0, 2.0)), False),
        (blurred, False),
        (GaussianNoise(0.3), False),
        (torch.zeros_like, False),
    ],
)
@pytest.mark.parametrize("kind", ["pixels", "numbers"])
def test_a_strong_view_that_moves_pixels_is_refused(strong: Any, moves: bool, kind: str) -> None:
    images = torch.randint(0, 256, (12, 3, 16, 16), generator=torch.Generator().manual_seed(0)).byte()
    part = (images if kind == "pixels" else images / 64 - 2, (images[:, 0] > 128).long())
    given: dict[str, Any] = {"task": Segmentation(), "num_clients": 2, "num_labels": 4, "validation": 0}
    data = FederatedDataModule.from_datasets(part, part, weak="none", strong=strong, **given)
    if moves:
        with pytest.raises(ValueError, match=r"data\.strong: .* moves nothing"):
            data.setup()
    else:
        data.setup()


TABLE = "age,red,round,price\n" + "".join(
    f"{age},{'NA' if age == 3 else age % 2},{'NA' if age == 3 else age % 3 % 2},{2.5 * age}\n" for age in range(30)
)


@pytest.mark.parametrize("images", [False, True])
def test_columns_of_labels(images: bool, tmp_path: Path) -> None:
    """Several columns of 0 and 1, or a column of numbers; a row without any is one without a label."""
    path, columns = tmp_path / "data.csv", ["red", "round"]
    if images:
        mask_folders(tmp_path)
        rows = [f"train/images/p{k:02}.png,train,{k % 2},{'' if k == 3 else 1}" for k in range(12)]
        rows += [f"test/images/p{k:02}.png,test,1,{k % 2}" for k in range(4)]
        path.write_text("file,split,red,round\n" + "\n".join(rows) + "\n")
        data = FederatedDataModule(ImageTable(str(path), 8, label_columns=columns), task=MultiLabel(), weak="none",
                                   strong="none", num_clients=2, num_labels=4, validation=0)  # fmt: skip
        data.setup()
        assert data._train.labels[3].tolist() == [1, -1]
        return
    path.write_text(TABLE)
    task = MultiLabel()
    source = Table(str(path), label_columns=columns, ignore=["price"])
    source.task = task
    spec, train, test, _ = source.load()
    assert (spec.class_names, len(train.labels), len(test.labels)) == (("red", "round"), 25, 5)
    assert task.missing(1, train.labels).tolist() in train.labels[:, None].tolist()
    priced = Table(str(path), label_columns=["price"], ignore=columns)
    priced.task = Regression()
    assert sorted(torch.cat([priced.load().train.labels, priced.load().test.labels]).flatten().tolist()) == [
        2.5 * age for age in range(30)
    ]
    path.write_text(TABLE.replace("4,0,", "4,no,"))
    with pytest.raises(ValueError, match=r"row \d+: 'no' in the label column red"):
        Table(str(path), label_columns=columns)


def test_u_net_has_logits_of_every_pixel_of_any_size() -> None:
    for size in ((8, 8), (13, 6)):
        network = build_network(partial(UNet, width=4), 3, (1, *size), (3, *size))
        assert network(torch.zeros(2, 1, *size)).shape == (2, 3, *size)
    with pytest.raises(ValueError, match=r"gave \(2, 3, 8, 8\) .*not \(2, 3\)"):
        build_network(partial(UNet, width=4), 3, (1, 8, 8))


@pytest.mark.parametrize("task", [MultiLabel(), Segmentation()], ids=lambda task: type(task).__name__)
def test_predictions_and_the_bound_follow_the_task(task: Task, tmp_path: Path) -> None:
    network = partial(UNet, width=4) if task.per_pixel else network_of(task)
    run = FederatedTrainer(max_rounds=1, clients_per_round=2, accelerator="cpu", default_root_dir=tmp_path,
                           callbacks=[LabelsAlone()])  # fmt: skip
    data, algorithm = data_of(task), FixMatch(network=network, optimizer=sgd)
    run.fit(algorithm, data)
    assert f"bound/{task.monitor}" in run.callback_metrics
    (predicted,) = run.predict(algorithm, data)
    folder = Path(str(run.log_dir))
    loaded = FixMatch.load_from_checkpoint(folder / "checkpoints/last.ckpt")
    assert torch.equal(loaded.eval().predict_step(evaluated(data, torch.arange(40)), 0), predicted)
    built, description = load_network(folder / "checkpoints")
    assert (description["task"], type(built)) == (type(task).__name__, type(algorithm.network))
    if task.per_pixel:
        written = np.stack([np.array(Image.open(folder / f"predictions/{k}.png")) for k in range(40)])
        assert np.array_equal(written, predicted.argmax(1).numpy())
    else:
        rows = (folder / "predictions.csv").read_text().splitlines()
        assert (rows[0], len(rows)) == ("image,0,1,2", 41)
        assert float(rows[1].split(",")[2]) == pytest.approx(float(predicted[0, 1]), rel=1e-5)


def test_what_needs_one_class_refuses_other_tasks() -> None:
    with pytest.raises(ValueError, match="PseudoLabelPoison gives"):
        PseudoLabelPoison().check_data(data_of(Regression()))
    with pytest.raises(ValueError, match="ClientEvaluation needs one class"):
        trained(FedAvg, Regression(), {"callbacks": [ClientEvaluation()]})


class Pair(Regression):
    """Two outputs for each number, of which the first is the prediction."""

    def output_shape(self, num_classes: int, in_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (2 * num_classes,)

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().entry_losses(outputs[:, ::2], targets) + outputs[:, 1::2].square()

    def probabilities(self, outputs: Tensor) -> Tensor:
        return super().probabilities(outputs[:, ::2])


def test_a_task_sets_the_number_of_outputs(tmp_path: Path) -> None:
    run = trained(Supervised, Pair(), {"default_root_dir": tmp_path, "logger": True})
    network, _ = load_network(Path(str(run.log_dir)) / "checkpoints")
    assert network(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


def test_an_exported_model_predicts_in_the_unit_of_the_data(tmp_path: Path) -> None:
    """The network says 0 or 1 for the mean 50 or one std of 10 above it; the exported program says 50 or 60."""
    task = Regression(mean=50, std=10)
    run = trained(Supervised, task, {"default_root_dir": tmp_path, "logger": True})
    network, description = load_network(Path(str(run.log_dir)) / "checkpoints")
    assert description["target_normalization"] == {"mean": 50.0, "std": 10.0}
    export(network, description, tmp_path / "hub", "hub")
    images = torch.rand(3, 1, 8, 8)
    mean, std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in description["normalization"].values())
    program = torch.export.load(tmp_path / "hub/model.pt2").module()
    torch.testing.assert_close(program(images), 50 + 10 * network((images - mean) / std))
    assert "unit of the data" in (tmp_path / "hub/README.md").read_text()
