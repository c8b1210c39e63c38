"""Warns when self-training has collapsed, that is, when a model predicts one class for nearly every image."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.trainer_interface import TrainerInterface

_log = logging.getLogger(__name__)


class _Symptom(NamedTuple):
    """Two scalars that show a collapse together, and a description of the labels that they measure."""

    share: str
    accuracy: str
    subject: str


SYMPTOMS = (
    _Symptom("pseudo_label/largest_class_share", "pseudo_label/confident_accuracy", "of the confident pseudo-labels"),
    _Symptom("group/largest_class_share", "group/accuracy_min", "of one group's predictions on the validation images"),
    _Symptom("val/largest_class_share", "val/accuracy", "of the global model's predictions on the validation images"),
    _Symptom("test/largest_class_share", "test/accuracy", "of the global model's predictions on the test images"),
)


class CollapseDetector(FederatedCallback):
    """Warns when nearly all labels are of one class and most of them are wrong: self-training has collapsed.

    It checks the clients' confident pseudo-labels, the predictions of the global model and, for a method with groups,
    the predictions of the group means. It warns when, at ``patience`` consecutive measurements, one class has at least
    ``share`` of the labels and fewer than half of the labels are right. It warns again only after a recovery. An
    untrained model often predicts one class, too; ``patience`` avoids a warning about it. The callback logs
    ``val/largest_class_share`` and ``test/largest_class_share``: the share of the class that the evaluated model
    predicts most often. It does not affect training. Part of every run.

    Args:
        share: Labels count as collapsed if one class has at least this share, from above 0 to 1.
        patience: Number of consecutive measurements before the warning.
    """

    def __init__(self, share: float = 0.95, patience: int = 5) -> None:
        if not 0 < share <= 1 or patience < 1:
            raise ValueError(
                f"CollapseDetector: share is {share} and patience {patience}: give a share above 0 and up to 1, and a "
                "patience of 1 or more"
            )
        self.share = share
        self.patience = patience
        self._seen: dict[str, int] = {}
        self._hook: RemovableHandle | None = None
        self._class_counts: Tensor | None = None

    def on_evaluation_start(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Count the predictions of each class while the model is evaluated."""
        self._class_counts = None
        self._remove_hook()
        self._hook = algorithm.register_forward_hook(self._count)

    def on_evaluation_end(
        self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, metrics: dict[str, float]
    ) -> None:
        """Add the largest share to the metrics."""
        self._remove_hook()
        counts = [part.cpu() for part in trainer.gather(self._class_counts) if part is not None]
        stage = "test" if "test/accuracy" in metrics else "val"
        if counts:
            total = torch.stack(counts).sum(dim=0)
            metrics[f"{stage}/largest_class_share"] = float(total.max() / total.sum())

    def on_round_end(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        """Warn if the scalars of the round show a collapse."""
        for symptom in SYMPTOMS:
            if symptom.share in metrics:
                self._judge(trainer, symptom, metrics)

    def teardown(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, stage: str) -> None:  # type: ignore[override]
        """Remove the hook from the algorithm, also after an error."""
        self._remove_hook()

    def state_dict(self) -> dict[str, Any]:
        """The number of consecutive measurements in which each symptom was seen."""
        return {"seen": dict(self._seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self._seen = dict(state_dict["seen"])

    def _judge(self, trainer: TrainerInterface, symptom: _Symptom, metrics: dict[str, float]) -> None:
        share, accuracy = metrics[symptom.share], metrics.get(symptom.accuracy, 1.0)
        collapsed = share >= self.share and accuracy < 0.5
        self._seen[symptom.share] = self._seen.get(symptom.share, 0) + 1 if collapsed else 0
        if self._seen[symptom.share] == self.patience and trainer.is_global_zero:
            _log.warning(
                "round %d: one class has %.0f %% %s, of which %.0f %% are right: self-training has collapsed, or "
                "training has not begun. Raise model.threshold, lower the learning rate, or give the labelled images "
                "more weight; the scalars are %s and %s",
                trainer.round_index, 100 * share, symptom.subject, 100 * accuracy, symptom.share, symptom.accuracy,
            )  # fmt: skip

    def _count(self, module: Any, inputs: Any, logits: Tensor) -> None:
        counts = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).sum(dim=0)
        self._class_counts = counts if self._class_counts is None else self._class_counts + counts

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
