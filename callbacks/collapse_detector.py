"""Warns when self-training has collapsed: a model predicts one class for nearly every image, or for
more and more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.checkpoint import DECLINE, FEWEST

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView

_log = logging.getLogger(__name__)


class _Symptom(NamedTuple):
    """Two scalars that show a collapse together, a description of their labels, and the scalar that
    counts these.
    """

    share: str
    accuracy: str
    subject: str
    number: str = ""


SYMPTOMS = (
    _Symptom(
        "pseudo_label/largest_class_share",
        "pseudo_label/confident_accuracy",
        "of the confident pseudo-labels",
        "pseudo_label/confident_count",
    ),
    _Symptom(
        "val/largest_class_share",
        "val/accuracy",
        "of the global model's predictions on the validation data",
    ),
)


SHARE = 0.95
"""Labels count as collapsed if one class has at least this share."""

PATIENCE = 5
"""Consecutive measurements of a collapse before the warning."""


class _Course(NamedTuple):
    """A scalar that gets worse where clients learn wrong labels, when it counts as worse, and what
    to change.
    """

    scalar: str
    sign: int  # 1 if larger is better, else -1
    # Of the present value, the best one, and the validation images.
    is_worse: Callable[[float, float, int], bool]
    remedy: str


COURSES = (
    _Course(
        "server/loss",
        -1,
        lambda now, best, _: now > 1.25 * best + 0.1,
        "the clients pull the model away from the labels: fewer local steps (model.client_epochs "
        "1, or fewer model.client_steps), or more of the server's (model.server_steps or "
        "model.server_epochs)",
    ),
    _Course(
        "client/mask_rate",
        1,
        lambda now, best, _: best >= 0.2 and now < best / 2,
        "the model becomes less sure of its labels: fewer local steps (model.client_epochs 1, or "
        "fewer model.client_steps), or a lower model.optimizer.init_args.lr",
    ),
    _Course(
        "val/accuracy",
        1,
        lambda now, best, images: (
            best - now >= max(2 * DECLINE, 2 * math.sqrt(best * (1 - best) / max(images, 1)))
        ),
        "the clients learn their own errors: fewer local steps (model.client_epochs 1, or fewer "
        "model.client_steps), or a higher model.threshold",
    ),
)
"""Courses of a run that need no true label of a client."""

EARLY = 3
"""The number of consecutive rounds from which a course counts, and the rounds in which a model
counts as untrained."""


class CollapseDetector(FederatedCallback):
    """Warns when nearly all labels are of one class and most of them are wrong: self-training has
    collapsed.

    It checks the clients' confident pseudo-labels and the predictions of the global model. It warns
    when, at five consecutive measurements, one class has at least 95 % of the labels and fewer than
    half of the labels are right, or nobody knows how many are. It warns again only after a
    recovery. An untrained model often predicts one class, too, for fewer rounds. A round with fewer
    than 20 confident pseudo-labels is not counted, because so few labels may be of one class by
    chance; for the same reason fewer than 20 validation samples do not count.

    It warns early of a run that goes wrong, with the key to change, from scalars that need no true
    label of a client: at three consecutive rounds ``server/loss`` is a quarter above its smallest
    value, ``client/mask_rate`` is below half of its largest, or ``val/accuracy`` 10 points, and two
    standard errors, below its best; or in the first three rounds most labels are confident although
    fewer than 60 % of the validation data are right (without validation: although ``server/loss``
    is above 0.7), unless the threshold adapts to each client. Each of these is named once in a run.

    The callback does not affect training. Part of every run.
    """

    saved = ("seen", "peaks")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.seen: dict[str, int] = {}
        self.peaks: dict[str, tuple[float, int]] = {}

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Warn if the scalars of the round show a collapse."""
        if len(trainer.datamodule.validation_labels) < FEWEST:
            metrics = {name: metrics[name] for name in metrics if not name.startswith("val/")}
        # Of pixels and of several labels most may be of one class and right.
        for symptom in SYMPTOMS if "one class" in trainer.datamodule.task.gives else ():
            if symptom.share in metrics and metrics.get(symptom.number, FEWEST) >= FEWEST:
                self._judge(trainer, symptom, metrics)
        if "client/mask_rate" in metrics:
            self._judge_early(trainer, algorithm, metrics)

    def _judge(self, trainer: TrainerView, symptom: _Symptom, metrics: Metrics) -> None:
        share = metrics[symptom.share]
        accuracy = metrics.get(symptom.accuracy)
        collapsed = share >= SHARE and (accuracy is None or accuracy < 0.5)
        self.seen[symptom.share] = self.seen.get(symptom.share, 0) + 1 if collapsed else 0
        if self.seen[symptom.share] == PATIENCE and trainer.is_global_zero:
            right = "and how many are right is unknown"
            if accuracy is not None:
                right = f"of which {100 * accuracy:.0f} % are right"
            _log.warning(
                "round %d: one class has %.0f %% %s, %s: self-training has %scollapsed, or "
                "training has not begun. Raise model.threshold, lower the learning rate, or give "
                "the labelled data more weight; the scalars are %s and %s",
                trainer.round_index,
                100 * share,
                symptom.subject,
                right,
                "probably " if accuracy is None else "",
                symptom.share,
                symptom.accuracy,
            )

    def _judge_early(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        images = len(trainer.datamodule.validation_labels)
        for course in COURSES:
            if course.scalar not in metrics:
                continue
            now = metrics[course.scalar]
            best, when = self.peaks.get(course.scalar, (now, trainer.round_index))
            if course.sign * now >= course.sign * best:
                self.peaks[course.scalar] = best, when = now, trainer.round_index
            self._count(
                trainer, course.scalar, course.is_worse(now, best, images), EARLY,
                f"{course.scalar} was {best:.2f} in round {when} and is {now:.2f}: {course.remedy}",
            )  # fmt: skip
        untrained = (
            metrics["val/accuracy"] < 0.6
            if "val/accuracy" in metrics
            else metrics.get("server/loss", 0) > 0.7
        )
        # With a threshold that adapts half of the labels pass in every round.
        adapts = getattr(algorithm, "adaptive_threshold", False)
        many = metrics["client/mask_rate"] >= 0.5 and not adapts
        self._count(
            trainer, "early", trainer.round_index <= EARLY and many and untrained, 1,
            f"{100 * metrics['client/mask_rate']:.0f} % of the pseudo-labels are confident, but "
            "the model has learned little: a higher model.threshold, a lower "
            "model.optimizer.init_args.lr, or more labels",
        )  # fmt: skip

    def _count(
        self, trainer: TrainerView, name: str, holds: bool, needed: int, message: str
    ) -> None:
        """Count the consecutive rounds in which a sign holds; warn of it once in a run."""
        if self.seen.get(name, 0) >= needed:
            return
        self.seen[name] = self.seen.get(name, 0) + 1 if holds else 0
        if self.seen[name] == needed and trainer.is_global_zero:
            _log.warning("round %d: %s", trainer.round_index, message)
