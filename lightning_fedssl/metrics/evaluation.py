"""Metrics of an evaluation by torchmetrics: accuracy, the largest class's share, and those of
``trainer.metrics``.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Literal, Protocol, get_args

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import CatMetric, Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MulticlassRecall,
    MultilabelAveragePrecision,
    MultilabelF1Score,
)
from torchmetrics.functional.classification import binary_average_precision
from torchmetrics.regression import MeanAbsoluteError, R2Score
from torchmetrics.utilities.data import dim_zero_cat

from lightning_fedssl.metrics.rounds import Gather, Metrics
from lightning_fedssl.storage.named_value import target_of
from lightning_fedssl.task import Classification, Task

MetricName = Literal["macro_f1", "recall", "auroc", "calibration_error", "confusion_matrix"]
"""The metrics that have a name of their own."""


class _MetricOfClasses(Protocol):
    """A metric's class; ``num_classes`` comes from the data and is therefore no key of the
    configuration.
    """

    def __call__(self, *, num_classes: int) -> Metric: ...


MetricFactory = _MetricOfClasses | Callable[[], Metric]
"""A metric's class, a partial of it, or a function that returns a metric."""


class LargestClassShare(Metric):
    """The share of the class that is predicted most often: 1 for a model that predicts one class
    for all images.

    Args:
        num_classes: Number of classes.
    """

    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Count the predictions of each class."""
        # A comparison and not F.one_hot, which reads its input on the host and would wait for the
        # device.
        classes = torch.arange(len(self.counts), device=probabilities.device)
        self.counts += (probabilities.argmax(dim=-1, keepdim=True) == classes).sum(dim=0)

    def compute(self) -> Tensor:
        """The largest count divided by the sum of all."""
        return self.counts.max() / self.counts.sum()


class PresentAUROC(MulticlassAUROC):
    """The mean area under the ROC curve, one class against the others, over the classes of the
    evaluated samples.

    Args:
        num_classes: Number of classes.
    """

    @property
    def is_defined(self) -> bool:
        """Whether the samples have two classes or more.

        A curve needs samples of a class and samples of another.
        """
        return len(dim_zero_cat(self.target).unique()) > 1

    def compute(self) -> Tensor:  # type: ignore[override]
        """The mean over classes with a sample; for the others torchmetrics gives 0."""
        present = dim_zero_cat(self.target).bincount(minlength=self.num_classes) > 0
        return torch.as_tensor(super().compute())[present].mean()


class PresentRecall(MulticlassRecall):
    """The recall of each class, NaN for a class without a sample.

    Args:
        num_classes: Number of classes.
    """

    def compute(self) -> Tensor:
        """Recall ``(num_classes,)``; torchmetrics gives 0 for a class without a sample."""
        samples = torch.as_tensor(self.tp) + torch.as_tensor(self.fn)
        return torch.where(samples > 0, super().compute(), torch.nan)


class PresentAveragePrecision(MultilabelAveragePrecision):
    """The mean average precision over the classes of the evaluated samples.

    Args:
        num_labels: Number of classes.
    """

    def compute(self) -> Tensor:  # type: ignore[override]
        """The mean over classes with a sample, for the others torchmetrics gives 0; or NaN."""
        target = dim_zero_cat(self.target)
        values = [
            binary_average_precision(scores, of_class, ignore_index=-1, validate_args=False)
            for scores, of_class in zip(dim_zero_cat(self.preds).T, target.T, strict=True)
            if (of_class == 1).any()
        ]
        return torch.stack(values).mean() if values else torch.tensor(torch.nan)


class PresentF1(MultilabelF1Score):
    """The mean F1 score over the classes of the evaluated samples, as of the average precision.

    Args:
        num_labels: Number of classes.
    """

    def compute(self) -> Tensor:
        """The mean over classes with a sample; or NaN."""
        present = torch.as_tensor(self.tp) + torch.as_tensor(self.fn) > 0
        return super().compute()[present].mean()


class EachError(Metric):
    """The mean absolute error of each of several outputs, ``(outputs,)``; empty of one output.

    Args:
        num_classes: Number of outputs.
    """

    total: Tensor
    count: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add the errors of a batch."""
        self.total += (predictions - targets).abs().sum(dim=0)
        self.count += len(targets)

    def compute(self) -> Tensor:
        """The sums divided by the number of samples."""
        return self.total / self.count if len(self.total) > 1 else self.total[:0]


class DefinedR2(R2Score):
    """R2, NaN for a single sample, with which torchmetrics raises an error."""

    def compute(self) -> Tensor:
        """R2 of all outputs together."""
        return super().compute() if self.total > 1 else torch.tensor(torch.nan)


class LargestErrors(CatMetric):
    """The predicted numbers with the 12 largest errors and an even choice of the others, at most
    500, the largest error first: ``(numbers, 3)`` with the place among all numbers of the samples,
    the true number and the prediction.
    """

    def update(self, predictions: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """Keep both."""
        super().update(torch.stack([targets, predictions], dim=-1))

    def compute(self) -> Tensor:
        """Choose."""
        true, predicted = torch.as_tensor(super().compute()).flatten(end_dim=-2).T
        order = (predicted - true).abs().argsort(descending=True)
        ranks = torch.linspace(0, len(order) - 1, min(len(order), 500)).round().long()
        ranks[:12] = torch.arange(len(ranks[:12]))
        rows = order[ranks]
        return torch.stack([rows, true[rows], predicted[rows]], dim=1)


_NAMED: dict[str, Callable[..., Metric]] = {
    "accuracy": partial(MulticlassAccuracy, average="micro"),
    "largest_class_share": LargestClassShare,
    "macro_f1": partial(MulticlassF1Score, average="macro"),
    "recall": partial(PresentRecall, average="none"),
    "auroc": partial(PresentAUROC, average="none"),
    "calibration_error": partial(MulticlassCalibrationError, n_bins=15, norm="l1"),
    "confusion_matrix": MulticlassConfusionMatrix,
    "iou": partial(MulticlassJaccardIndex, ignore_index=-1),
    "dice": partial(MulticlassF1Score, average="macro", ignore_index=-1),
    "average_precision": partial(PresentAveragePrecision, average="none", ignore_index=-1),
    "f1": partial(PresentF1, average="none", ignore_index=-1),
    "mae": MeanAbsoluteError,
    "mae_each": EachError,
    "r2": DefinedR2,
    "largest_errors": partial(LargestErrors, nan_strategy="disable"),
}


_ONE_CLASS = (
    "all evaluated samples have one class, for which the area under the ROC curve is not defined"
)


class EvaluationMetrics:
    """The metrics of an evaluation, and then of the next, equal on any number of ranks.

    Every metric is updated with class probabilities ``(batch, classes)`` in 64 bits and labels
    ``(batch,)``, or what else the task predicts. With several ranks each metric sees all batches in
    the order of the data, so any metric of torchmetrics can be used: it needs no rule for combining
    ranks.

    Args:
        chosen: Names and factories, as in ``trainer.metrics``; those of the task are always added.
        num_classes: Number of classes; 0 gives no metric.
        ranks: Number of ranks.
        task: What is predicted.

    Raises:
        ValueError: If two metrics have the same name, or one does not exist or cannot be made.
    """

    def __init__(
        self,
        chosen: Sequence[MetricName | MetricFactory],
        num_classes: int,
        ranks: int = 1,
        task: Task | None = None,
    ) -> None:
        self._task = task = task or Classification()
        self._metrics: dict[str, Metric] = {}
        _check_names([one for one in chosen if isinstance(one, str)], task)
        for one in (*task.metrics, *chosen) if num_classes else ():
            name, metric = _make(one, num_classes)
            if name in self._metrics:
                raise ValueError(
                    f"trainer.metrics: two metrics have the name {name}; give each only once. "
                    f"{' and '.join(task.metrics)} are always logged; one with other arguments "
                    "needs a class with another name"
                )
            self._metrics[name] = metric
        self._ranks = ranks
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._seen = False

    @property
    def names(self) -> list[str]:
        """The names of the metrics."""
        return list(self._metrics)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add this rank's next batch.

        Args:
            logits: ``(batch, classes)``.
            labels: ``(batch,)``.
        """
        batch = (self._task.probabilities(logits.detach().double()), labels)
        if self._ranks == 1:
            self._feed(*batch)
        else:
            self._batches.append((batch[0].cpu(), batch[1].cpu()))

    def compute(self, gather: Gather) -> dict[str, Tensor]:
        """Every metric's value by its name, on the CPU; empty if no rank had a batch. Every rank
        must call it. What was added is forgotten.

        ``auroc`` is left out, with a warning, if all samples have one class.

        Args:
            gather: Gives every rank's value on every rank.

        Raises:
            ValueError: If a metric's value is not a number, a vector or a matrix.
        """
        if self._ranks > 1:
            # Rank r has the batches r, r + ranks, ...
            for batch in chain(*zip_longest(*gather(self._batches))):
                if batch is not None:
                    self._feed(*batch)
        if not self._seen:
            return {}
        values = {}
        for name, metric in self._metrics.items():
            if isinstance(metric, PresentAUROC) and not metric.is_defined:
                rank_zero_warn(f"trainer.metrics: {name} is left out, because {_ONE_CLASS}")
                continue
            values[name] = _as_tensor(name, self._checked(name, metric.compute)).cpu()
        for metric in self._metrics.values():
            metric.reset()
        self._batches = []
        self._seen = False
        return values

    def _feed(self, probabilities: Tensor, labels: Tensor) -> None:
        self._seen = True
        for name, metric in self._metrics.items():
            update = metric.to(probabilities.device).update
            self._checked(name, partial(update, probabilities, labels))

    def _checked(self, name: str, function: Callable[[], Any]) -> Any:
        """The result of a metric's function, whose errors are named."""
        try:
            return function()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a metric raises
            raise ValueError(
                f"trainer.metrics: {name} does not take the predictions and targets of "
                f"{type(self._task).__name__}: {str(error)[:200]}; torchmetrics names those for "
                "one class of each sample or pixel Multiclass..., for several labels "
                "Multilabel...; those of targets that are partly -1 need ignore_index: -1"
            ) from error


def _check_names(names: Sequence[str], task: Task) -> None:
    """Refuse names of no metric, and those of one class a sample where the task has another."""
    supported = get_args(MetricName)
    if unknown := [name for name in names if name not in supported]:
        raise ValueError(
            f"trainer.metrics: there is no metric {unknown[0]!r}; give a list of "
            f"{', '.join(supported)}, or of metrics' classes"
        )
    if names and "one class" not in task.gives:
        raise ValueError(
            f"trainer.metrics: {names[0]} is for Classification, and data.task is "
            f"{type(task).__name__}; give a metric of torchmetrics by its class"
        )


def _as_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, (Tensor, float, int)) or torch.as_tensor(value).dim() > 2:
        raise ValueError(
            f"trainer.metrics: the value of {name} is not a number, a vector or a matrix: choose "
            "another metric"
        )
    return torch.as_tensor(value)


def scalars(values: dict[str, Tensor]) -> Metrics:
    """Numbers by name; of a vector with one number per class, ``name/class_k``, without NaN.
    Matrices are not scalars.

    Args:
        values: Values of metrics by name.
    """
    numbers = {}
    for name, value in values.items():
        if value.dim() == 0:
            numbers[name] = float(value)
        elif value.dim() == 1:
            for k, number in enumerate(value.tolist()):
                if not math.isnan(number):
                    numbers[f"{name}/class_{k}"] = number
    return numbers


def _make(chosen: str | Callable[..., Metric], num_classes: int) -> tuple[str, Metric]:
    factory = _NAMED[chosen] if isinstance(chosen, str) else chosen
    target = target_of(factory)
    accepts = inspect.signature(target).parameters
    try:
        sizes = {"num_classes", "num_labels"} & accepts.keys()
        metric = factory(**dict.fromkeys(sizes, num_classes))
    except Exception as error:
        raise ValueError(
            f"trainer.metrics: {getattr(target, '__name__', target)} cannot be made: {error}"
        ) from error
    metric.reset()  # a function of the user's may return the same object for every evaluation
    for part in metric.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = lambda: False  # every rank has fed all batches
    if isinstance(chosen, str):
        metric.validate_args = False  # a check would wait for the device at every batch
        metric.set_dtype(torch.float64)
        return chosen, metric
    return snake_case(re.sub("^Multi(class|label)", "", type(metric).__name__)), metric


def snake_case(name: str) -> str:
    """The name of a class as that of a module: ``CohenKappa`` as ``cohen_kappa``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
