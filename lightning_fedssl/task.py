"""What is predicted of a sample: the form of targets, their losses, and how a model labels.

A method asks its ``task`` for losses and pseudo-labels, the data ask it which classes a partition
sees, and an evaluation which metrics to log. No other module knows what a target looks like.

An *entry* is what has a target of its own: the sample itself, one of its labels, one of its pixels.
Shapes: ``(n, *entries)`` for targets, losses and masks; the network's outputs are ``(n, outputs)``
or, of pixels, ``(n, outputs, height, width)``. The target -1 (a NaN of a regression) is missing: it
has no loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.functional.losses import kl_divergence
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, at_least_float32, pseudo_label

Need = Literal["loss", "confidence", "classes", "one class"]
"""What a method needs of a task: a loss; labels with a confidence; labels that are classes, with
probabilities; one class for each sample."""

_FUNCTIONS: dict[Need, tuple[str, ...]] = {
    "confidence": ("label",),
    "classes": ("hard", "true_probability", "frequency", "divergences"),
}
"""What a task defines beside its loss to give more than that."""

__all__ = ["Classification", "MultiLabel", "Regression", "Segmentation", "Task"]


class Task(ABC):
    """Base class of tasks.

    Attributes:
        metrics: The metrics that are always logged. The first one chooses the best round.
        larger_is_better: Whether a larger value of the first metric is better.
        is_share: Whether the first metric is a share from 0 to 1, which tables show in per cent.
        gives: What it has for methods: ``loss``; ``confidence``, if it defines :meth:`label`;
            ``classes``, if every label is a class, and it defines :meth:`hard`,
            :meth:`true_probability`, :meth:`frequency` and :meth:`divergences`; ``one class``, if
            every sample has one.
        min_classes: The smallest number of classes, or of outputs.
        outputs: What a network's outputs are, for those who read an exported model.
        per_pixel: Whether every pixel has a target. Then weak views move an image and its target
            alike, and strong views change colours but move nothing beyond their weak view.
    """

    metrics: ClassVar[Sequence[str]]
    gives: ClassVar[Sequence[Need]] = ("loss",)
    larger_is_better: ClassVar[bool] = True
    is_share: ClassVar[bool] = True
    min_classes: ClassVar[int] = 1
    per_pixel: ClassVar[bool] = False
    outputs: ClassVar[str] = "logits; a softmax over the classes gives their probabilities"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for need in cls.gives:
            for name in _FUNCTIONS.get(need, ()):
                if getattr(cls, name) is getattr(Task, name):
                    raise TypeError(
                        f"{cls.__name__}.gives has {need!r}, and {cls.__name__} does not define "
                        f"{name}: define it, or leave {need!r} out of gives"
                    )

    @property
    def monitor(self) -> str:
        """The metric by which rounds and methods are compared."""
        return self.metrics[0]

    def format_value(self, value: float, form: str = "") -> str:
        """A value of the first metric as people read it: a share in per cent."""
        return f"{100 * value:{form}.1f}" if self.is_share else f"{value:{form}.3g}"

    # Of a data set.

    def clean_targets(self, targets: Tensor) -> Tensor:
        """Targets as somebody stored them, in the usual shape, NaN as missing."""
        return targets.nan_to_num(nan=-1) if targets.is_floating_point() else targets

    @abstractmethod
    def checked(
        self, targets: Tensor, num_classes: int, source: str, allow_missing: bool = False
    ) -> Tensor:
        """The targets in the type of the task, after a check of their shape and values.

        Args:
            targets: ``(N, *entries)``.
            num_classes: Number of classes, or of outputs.
            source: The key and the part of the data, with which a message starts.
            allow_missing: Whether targets may be missing.

        Raises:
            ValueError: Says what to give.
        """

    def count(self, targets: Tensor) -> int:
        """The number of classes, or of outputs, that training targets ``(N, *entries)`` show."""
        return targets.shape[1] if targets.dim() == 2 else 1

    def advice(self, targets: Tensor) -> str:
        """What makes training targets ``(N, *entries)`` hard to learn, and the remedy; or empty."""
        return ""

    def missing(self, count: int, like: Tensor) -> Tensor:
        """Targets of ``count`` samples that have none, in the shape and type of others."""
        return like.new_full((count, *like.shape[1:]), -1)

    @abstractmethod
    def strata(self, targets: Tensor, num_classes: int) -> Tensor:
        """The class that partition, balance and validation take each sample to have.

        Returns:
            ``(N,)`` int64, -1 for a sample without a known target.
        """

    def strata_names(self, class_names: Sequence[str]) -> tuple[str, ...]:
        """The names of the classes of :meth:`strata`."""
        return (*class_names,)

    def classes_of(self, labels: Tensor, num_classes: int) -> Tensor:
        """The class of each entry's label by the names of :meth:`strata_names`, in their shape."""
        return labels

    def output_shape(self, num_classes: int, in_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a network's output for one sample of the shape ``in_shape``."""
        return (num_classes, *in_shape[1:]) if self.per_pixel else (num_classes,)

    # Of a batch.

    @abstractmethod
    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each entry, 0 where the target is missing: ``(n, *entries)``.

        Targets may be hard, or probabilities as :meth:`label` returns with ``soft``.
        """

    def known(self, targets: Tensor) -> Tensor:
        """Whether each entry has a target: ``(n, *entries)`` bool."""
        return targets >= 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of all entries of a batch that have a target."""
        count = self.known(targets).sum().clamp(min=1)
        return self.entry_losses(outputs, targets).sum() / count

    def labeled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of true labels, by the task's weights, smoothing or loss of its own."""
        return self.loss(outputs, targets)

    def labeled_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each true label times its weight, 0 where it is missing."""
        return self.entry_losses(outputs, targets)

    def labeled_weight(self, outputs: Tensor, targets: Tensor) -> Tensor | int:
        """The number by which :meth:`labeled_loss` divides: the weight of a batch among others."""
        return self.known(targets).sum()

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Tensor:
        """What ``predict`` returns and metrics see, in the shape of ``outputs``."""

    def target_normalization(self) -> dict[str, Any]:
        """The ``mean`` and ``std`` by which outputs become numbers in the unit of the data: a
        number, or one for each output.
        """
        return {}

    def distances(self, outputs: Tensor, others: Tensor) -> Tensor:
        """The mean squared distance between two predictions of each sample: ``(n,)``."""
        difference = self.probabilities(outputs) - self.probabilities(others)
        return difference.square().flatten(1).mean(dim=1)

    def label(self, outputs: Tensor, threshold: float, *, soft: bool = False) -> PseudoLabels:
        """Pseudo-labels with a confidence and a mask for each entry.

        Args:
            outputs: Of the network.
            threshold: tau; the test is inclusive.
            soft: Return probabilities in place of labels.
        """
        raise NotImplementedError(f"{type(self).__name__} has no confidence")

    def hard(self, labels: Tensor) -> Tensor:
        """Labels, of labels or of probabilities: ``(n, *entries)``."""
        raise NotImplementedError(f"{type(self).__name__} has no labels")

    def true_probability(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """The probability of each entry's target ``(n, *entries)``, and that of a blind guess."""
        raise NotImplementedError(f"{type(self).__name__} has no probabilities")

    def frequency(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """The mean probability of each entry's label, relative to that of the most probable one.

        Args:
            probabilities: Of many samples, in the shape of the outputs.
            labels: ``(n, *entries)``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no probabilities")

    def divergences(self, outputs: Tensor, probabilities: Tensor) -> Tensor:
        """``KL(probabilities || outputs)`` of each entry: ``(n, *entries)``."""
        raise NotImplementedError(f"{type(self).__name__} has no probabilities")

    def consistency_loss(self, outputs: Tensor, pseudo: PseudoLabels) -> Tensor:
        """The losses of the confident entries, divided by the number of all (FixMatch Eq. 4)."""
        return (self.entry_losses(outputs, pseudo.labels) * pseudo.mask).mean()

    def confident_targets(self, pseudo: PseudoLabels) -> Tensor:
        """Labels as targets, missing where they are not confident."""
        return torch.where(pseudo.mask, pseudo.labels, self.missing(1, pseudo.labels))

    def any_confident(self, pseudo: PseudoLabels) -> Tensor:
        """Whether a sample has a confident entry: ``(n,)`` bool."""
        return pseudo.mask.unsqueeze(-1).flatten(1).any(dim=1)


class _Softmax(Task):
    """One class for each entry, by cross-entropy: :class:`Classification`, :class:`Segmentation`.

    Args:
        class_weights: A weight of each class in the loss of true labels; 1 if left out.
        label_smoothing: The share of a true label that is spread over all classes, from 0 to 1.
        criterion: The loss of true labels in place of cross-entropy.
    """

    min_classes = 2
    gives: ClassVar[Sequence[Need]] = ("loss", "confidence", "classes")

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        criterion: Callable[[], nn.Module] | None = None,
    ) -> None:
        weights = [1.0] if class_weights is None else _numbers("class_weights", class_weights)
        usable = all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
        made = isinstance(criterion, nn.Module) or (criterion and label_smoothing)
        if not 0 <= label_smoothing <= 1 or not usable or made:
            raise ValueError(
                f"data.task: label_smoothing is {label_smoothing} and class_weights "
                f"{class_weights}: give a share from 0 to 1, weights of 0 or more, not all 0, and "
                "criterion as a class or functools.partial of one, without label_smoothing"
            )
        self.class_weights = None if class_weights is None else weights
        self.label_smoothing = label_smoothing
        self.criterion = criterion
        self._weights = torch.tensor(weights, dtype=torch.float64)
        self._cast_weights = self._weights  # to the outputs' type and device
        self._losses = criterion() if criterion else None

    def clean_targets(self, targets: Tensor) -> Tensor:
        """Class numbers; a channel of a mask, or of a label, is left out."""
        return super().clean_targets(targets.squeeze(1) if targets.dim() in (2, 4) else targets)

    def count(self, targets: Tensor) -> int:
        """The largest class number plus 1."""
        return int(targets.to(torch.int64).max()) + 1

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(outputs, targets, ignore_index=-1, reduction="none")

    def labeled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of :meth:`labeled_losses`, divided by that of the weights."""
        if self.class_weights is None and not self.label_smoothing and self.criterion is None:
            return self.loss(outputs, targets)
        losses = self.labeled_losses(outputs, targets)
        return losses.sum() / self._weights_of(outputs, targets).sum().clamp(min=1e-7)

    def labeled_weight(self, outputs: Tensor, targets: Tensor) -> Tensor | int:
        """The sum of the weights of the labels."""
        return self._weights_of(outputs, targets).sum()

    def labeled_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy with the weights of the classes, as PyTorch has it, or the task's own loss
        times these weights.
        """
        labels = targets.clamp(min=0)
        if self._losses is None:
            entries = F.cross_entropy(
                outputs,
                labels,
                self._weights_like(outputs),
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
            return entries * self.known(targets)
        losses: Tensor = self._losses.to(outputs.device)(outputs, labels)
        if losses.shape != targets.shape:
            raise ValueError(
                "data.task.criterion must return a loss for each label: give reduction: none"
            )
        return losses * self._weights_of(outputs, targets)

    def _weights_like(self, outputs: Tensor) -> Tensor | None:
        """The weight of each class, or None."""
        if self.class_weights is None:
            return None
        cast = self._cast_weights
        if cast.dtype != outputs.dtype or cast.device != outputs.device:
            self._cast_weights = self._weights.to(outputs)  # once: a copy waits for the device
        return self._cast_weights

    def _weights_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The weight of each target's class, 0 where it is missing."""
        has_target = self.known(targets)
        weights = self._weights_like(outputs)
        return has_target if weights is None else weights[targets.clamp(min=0)] * has_target

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The softmax over the classes."""
        return torch.softmax(outputs, dim=1)

    def label(self, outputs: Tensor, threshold: float, *, soft: bool = False) -> PseudoLabels:
        """The most probable class of each entry, and its probability."""
        return pseudo_label(outputs, threshold, soft=soft)

    def hard(self, labels: Tensor) -> Tensor:
        """The class with the largest probability; class numbers as they are."""
        return labels.argmax(dim=1) if labels.is_floating_point() else labels

    def true_probability(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """The softmax probability of the true class, and that of chance."""
        probabilities = torch.softmax(outputs, dim=1).gather(1, targets.clamp(min=0).unsqueeze(1))
        return probabilities.squeeze(1), 1 / outputs.shape[1]

    def frequency(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """The mean predicted share of each label's class, relative to the largest."""
        share = probabilities.mean(dim=[0, *range(2, probabilities.dim())])
        return (share / share.max())[labels]

    def divergences(self, outputs: Tensor, probabilities: Tensor) -> Tensor:
        """``KL(probabilities || softmax(outputs))`` of each entry."""
        return kl_divergence(outputs, probabilities)

    def _check_weights(self, num_classes: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != num_classes:
            raise ValueError(
                f"data.task: class_weights has {len(self.class_weights)} weights for "
                f"{num_classes} classes; give one for each"
            )


class Classification(_Softmax):
    """One class for each sample: targets ``(N,)`` int64.

    Args:
        class_weights: A weight of each class in the loss of true labels, for rare classes.
        label_smoothing: The share of a true label that is spread over all classes, from 0 to 1.
        criterion: The loss of true labels in place of cross-entropy, a class or a partial of one
            that returns a loss for each: ``partial(torch.nn.MultiMarginLoss, reduction="none")``.

    Example:
        >>> import torch
        >>> task = Classification()
        >>> task.label(torch.tensor([[4.0, 0.0], [0.1, 0.0]]), threshold=0.95).mask
        tensor([ True, False])
    """

    metrics = ("accuracy", "largest_class_share")
    gives = ("loss", "confidence", "classes", "one class")

    def checked(
        self, targets: Tensor, num_classes: int, source: str, allow_missing: bool = False
    ) -> Tensor:
        """Class numbers int64 ``(N,)``."""
        self._check_weights(num_classes)
        return check_labels(targets, num_classes, source, allow_missing)

    def strata(self, targets: Tensor, num_classes: int) -> Tensor:
        """The class itself."""
        return targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of a batch, of classes or of probabilities."""
        return F.cross_entropy(outputs, targets)

    def labeled_weight(self, outputs: Tensor, targets: Tensor) -> Tensor | int:
        """The number of labels, or the sum of their weights."""
        weighted = self.class_weights is not None
        return super().labeled_weight(outputs, targets) if weighted else len(targets)

    def confident_targets(self, pseudo: PseudoLabels) -> Tensor:
        """The labels: a method leaves out whole samples, by their mask."""
        return pseudo.labels


class Segmentation(_Softmax):
    """One class for each pixel: targets ``(N, height, width)`` int64.

    Logits are ``(n, classes, height, width)``. A pseudo-label has a confidence and a mask for each
    pixel. IoU and Dice are means over the classes, each over the pixels of all samples together.

    Args:
        class_weights: A weight of each class in the loss of true labels, for small structures.
        label_smoothing: The share of a true label that is spread over all classes, from 0 to 1.
        criterion: The loss of true labels in place of cross-entropy, a class or a partial of one
            that returns a loss for each: ``partial(torch.nn.MultiMarginLoss, reduction="none")``.
    """

    metrics = ("iou", "dice")
    per_pixel = True
    outputs = "logits of each pixel; a softmax over the classes gives their probabilities"

    def checked(
        self, targets: Tensor, num_classes: int, source: str, allow_missing: bool = False
    ) -> Tensor:
        """Class numbers int64 ``(N, height, width)``; -1 marks pixels that do not count."""
        self._check_weights(num_classes)
        classes = targets.to(torch.int64)
        wrong = (classes != targets.double()) | (classes < -1) | (classes >= num_classes)
        if not allow_missing and (classes < 0).all():
            raise ValueError(f"{source}: no pixel of its masks has a class: all are -1")
        if targets.dim() != 3 or wrong.any():
            raise _refusal(
                f"{source}: Segmentation (data.task) needs masks (samples, height, width) of class "
                f"numbers from 0 to {num_classes - 1}, and -1 where a pixel does not count",
                targets,
                wrong,
            )
        return classes

    def strata(self, targets: Tensor, num_classes: int) -> Tensor:
        """The class with the most pixels but 0, the background, unless there is no other."""
        flat = targets.flatten(1)
        counts = torch.stack([(flat == k).sum(dim=1) for k in range(num_classes)], dim=1)
        largest = counts[:, 1:].max(dim=1)
        chosen = torch.where(largest.values > 0, largest.indices + 1, 0)
        return torch.where(counts.sum(dim=1) > 0, chosen, -1)


class MultiLabel(Task):
    """Any number of classes for each sample: targets ``(N, classes)`` of 0 and 1, -1 for unknown.

    The classes are independent of each other: sigmoid and binary cross-entropy, no softmax. A
    pseudo-label has a confidence ``max(p, 1 - p)`` and a mask for each class.

    Example:
        >>> import torch
        >>> MultiLabel().label(torch.tensor([[4.0, -4.0, 0.1]]), threshold=0.95)[::2]
        (tensor([[1, 0, 1]]), tensor([[ True,  True, False]]))
    """

    metrics = ("average_precision", "f1")
    gives = ("loss", "confidence", "classes")
    outputs = "logits; the sigmoid of each is the probability of its class"

    def checked(
        self, targets: Tensor, num_classes: int, source: str, allow_missing: bool = False
    ) -> Tensor:
        """0, 1, or -1 for unknown, int64 ``(N, classes)``."""
        wrong = (targets != 0) & (targets != 1) & (targets != -1)
        if not allow_missing:  # a sample without any label is of no use
            wrong |= (targets < 0).all(dim=-1, keepdim=True)
        if targets.shape[1:] != (num_classes,) or wrong.any():
            raise _refusal(
                f"{source}: MultiLabel (data.task) needs 0 or 1 for each of {num_classes} classes "
                "of every sample, and -1 for what is not known beside others",
                targets,
                wrong,
            )
        return targets.to(torch.int64)

    def strata(self, targets: Tensor, num_classes: int) -> Tensor:
        """The rarest of a sample's classes; ``num_classes`` if it has none."""
        positive = targets == 1
        counts = torch.where(positive, positive.sum(dim=0), len(targets) + 1)
        rarest = counts.min(dim=1)
        chosen = torch.where(rarest.values <= len(targets), rarest.indices, num_classes)
        return torch.where((targets < 0).all(dim=1), -1, chosen)

    def strata_names(self, class_names: Sequence[str]) -> tuple[str, ...]:
        """The classes, and ``(none)``."""
        return (*class_names, "(none)")

    def classes_of(self, labels: Tensor, num_classes: int) -> Tensor:
        """The class where it is present, ``num_classes`` where it is not; -1 for unknown."""
        classes = torch.arange(num_classes, device=labels.device).expand_as(labels)
        return torch.where(labels == 1, classes, torch.where(labels == 0, num_classes, -1))

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy of each class."""
        labels = targets.to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(outputs, labels.clamp(min=0), reduction="none")
        return losses * self.known(targets)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The sigmoid of each output."""
        return torch.sigmoid(outputs)

    def label(self, outputs: Tensor, threshold: float, *, soft: bool = False) -> PseudoLabels:
        """Whether each class is more probable than not, with the confidence ``max(p, 1 - p)``."""
        p = torch.sigmoid(at_least_float32(outputs))
        confidence = torch.maximum(p, 1 - p)
        return PseudoLabels(p if soft else self.hard(p), confidence, confidence >= threshold)

    def hard(self, labels: Tensor) -> Tensor:
        """1 where the probability is at least a half."""
        return (labels >= 0.5).long()

    def true_probability(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """The probability of each true answer, and that of chance, a half."""
        p = torch.sigmoid(outputs)
        return torch.where(targets == 1, p, 1 - p), 0.5

    def frequency(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """The predicted share of each answer, relative to the more frequent of both."""
        share = probabilities.mean(dim=0)
        return torch.where(labels == 1, share, 1 - share) / torch.maximum(share, 1 - share)

    def divergences(self, outputs: Tensor, probabilities: Tensor) -> Tensor:
        """Of the two outcomes of each class."""
        p = probabilities
        entropy = torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)
        return F.binary_cross_entropy_with_logits(outputs, p, reduction="none") + entropy


class Regression(Task):
    """Numbers for each sample: targets ``(N, outputs)`` float32, NaN for unknown; squared error.

    There is no confidence, so no pseudo-label: only methods without one can train. A subclass that
    predicts how uncertain it is gives one.

    Args:
        mean: Subtracted from the targets before training; predictions are in the data's unit. One
            number, or one for each output.
        std: The targets are divided by it. Give the rough size of their spread, of each output
            where outputs differ in unit or size.
        bins: Quantiles of the first number that partition and validation see as classes.
    """

    metrics = ("mae", "r2", "largest_errors", "mae_each")
    larger_is_better = False
    is_share = False
    outputs = "numbers in the unit of the data (of model.safetensors after target_normalization)"

    def __init__(
        self,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        bins: int = 5,
    ) -> None:
        self._mean = torch.as_tensor(mean, dtype=torch.float64)
        self._std = torch.as_tensor(std, dtype=torch.float64)
        self.mean = self._mean.tolist()
        self.std = self._std.tolist()
        usable = (self._mean + self._std).isfinite() & (self._std > 0)
        if not usable.all() or bins < 1:
            raise ValueError(
                f"data.task: mean is {mean}, std {std} and bins {bins}; give finite numbers, a std "
                "above 0, and 1 bin or more"
            )
        self.bins = bins

    def checked(
        self, targets: Tensor, num_classes: int, source: str, allow_missing: bool = False
    ) -> Tensor:
        """Float32 ``(N, outputs)``; NaN where a number is missing."""
        wrong = targets.isinf() if allow_missing else ~targets.isfinite()
        if not {self._mean.numel(), self._std.numel()} <= {1, num_classes}:
            raise ValueError(
                f"data.task: mean is {self.mean} and std {self.std} for {num_classes} outputs; "
                "give one number for each, or a single one"
            )
        if targets.shape[1:] != (num_classes,) or wrong.any():
            raise _refusal(
                f"{source}: Regression (data.task) takes columns of a CSV file by label_columns, "
                f"not label_column, and needs {num_classes} finite numbers a sample",
                targets,
                wrong,
            )
        return targets.float()

    def advice(self, targets: Tensor) -> str:
        """Names targets far from the outputs of a new network."""
        mean = targets.double().nanmean(dim=0)
        std = (targets - mean).square().nanmean(dim=0).sqrt()
        far = ((mean - self._mean).square() + std.square() >= (_LARGE * self._std) ** 2).any()
        unlike = self._std.numel() < len(std) and std.max() > _LARGE * std.min()
        if len(targets) < 2 or not (far or unlike):
            return ""
        texts = [", ".join(f"{number:.3g}" for number in numbers) for numbers in (mean, std)]
        return (
            f"the training targets have the mean {texts[0]} and the deviation {texts[1]}: give "
            "these as data.task.mean and std, or training may diverge, or learn the largest alone"
        )

    def clean_targets(self, targets: Tensor) -> Tensor:
        """Numbers ``(N, outputs)``, also from one number for each sample."""
        return targets[:, None] if targets.dim() == 1 else targets

    def missing(self, count: int, like: Tensor) -> Tensor:
        """NaN ``(count, outputs)``."""
        return torch.full((count, *like.shape[1:]), torch.nan, device=like.device)

    def known(self, targets: Tensor) -> Tensor:
        """Where a number is not NaN."""
        return ~targets.isnan()

    def strata(self, targets: Tensor, num_classes: int) -> Tensor:
        """The quantile of the first number."""
        first = targets[:, 0].double()
        cuts = torch.linspace(0, 1, self.bins + 1, dtype=first.dtype)[1:-1]
        edges = first.nanquantile(cuts) if len(first) else cuts
        return torch.where(first.isnan(), -1, torch.bucketize(first, edges))

    def strata_names(self, class_names: Sequence[str]) -> tuple[str, ...]:
        """The quantiles."""
        return tuple(f"{class_names[0]} {k + 1}/{self.bins}" for k in range(self.bins))

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error of each number, in units of ``std``."""
        mean, std = self._moments(outputs)
        return (outputs - (targets.nan_to_num() - mean) / std).square() * self.known(targets)

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation, one for each output or for all."""
        self._mean = self._mean.to(like.device)  # once: a copy waits for the device
        self._std = self._std.to(like.device)
        return self._mean.to(like.dtype), self._std.to(like.dtype)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The predicted numbers, in the unit of the data."""
        mean, std = self._moments(outputs)
        return outputs * std + mean

    def target_normalization(self) -> dict[str, Any]:
        """The configured mean and deviation."""
        return {"mean": self.mean, "std": self.std}

    def distances(self, outputs: Tensor, others: Tensor) -> Tensor:
        """The mean squared distance in units of ``std``: ``(n,)``."""
        return (outputs - others).square().flatten(1).mean(dim=1)


_LARGE = 10
"""Targets of a regression are large from this multiple of its ``std`` on."""


def _numbers(name: str, values: object) -> list[float]:
    """A sequence of any kind, such as an array, as numbers.

    Raises:
        ValueError: Names the argument of the task.
    """
    try:
        if isinstance(values, Mapping):
            raise TypeError("it is a mapping")
        return [*map(float, cast(Iterable[Any], values))]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"data.task: {name} is {values!r}: give numbers in the order of the classes ({error})"
        ) from error


def _refusal(needs: str, targets: Tensor, wrong: Tensor) -> ValueError:
    """What a task needs, and the first wrong target, or the shape of all."""
    fault = f"the targets are {tuple(targets.shape)} {targets.dtype}"
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        fault = f"sample {place[0]} has {targets[tuple(place)]:g}"
    return ValueError(f"{needs}; {fault}")


def check_labels(
    labels: Tensor, num_classes: int, source: str, allow_missing: bool = False
) -> Tensor:
    """Labels as int64, after a check that each names a class.

    Args:
        labels: ``(N,)`` whole numbers, of any type.
        num_classes: Number of classes.
        source: The key and the part of the data, with which a message starts.
        allow_missing: Whether samples may be without a label, -1.

    Raises:
        ValueError: If a label is not a whole number, or not a class.
    """
    numbers = labels.to(torch.int64)
    # PyTorch compares no unsigned type but uint8 with int64.
    wrong = (
        (numbers != labels.double()) | (numbers < -int(allow_missing)) | (numbers >= num_classes)
    )
    if labels.ndim != 1 or wrong.any():
        fault = labels.flatten()[wrong.flatten()][0].item() if wrong.any() else tuple(labels.shape)
        raise ValueError(
            f"{source}: {fault} is not a label; give one class number from 0 to {num_classes - 1} "
            "for each sample (of one-hot labels labels.argmax(1)), and samples without a label as "
            "unlabeled data; several classes of a sample, masks and measured numbers need "
            "data.task: MultiLabel, Segmentation or Regression"
        )
    return numbers
