"""Evaluates the group means, the models that methods with several groups send to their clients."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.metrics.evaluation import EvaluationMetrics
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import Run


class GroupQuality(FederatedCallback):
    """Evaluates the mean of each group on the validation images whenever the global model is
    evaluated (FedRGD).

    Clients receive the group means, but the trainer evaluates the mean of all groups. The mean of
    all groups can be accurate although each group mean predicts a single class. The callback logs,
    with the metrics of the evaluation:

    * ``group/accuracy_min``: the accuracy of the weakest group mean;
    * ``group/largest_class_share``: the share of validation images that a group mean assigns to the
      class which it predicts most often; the largest over the groups.

    Part of every run of a method with groups. It costs a pass over the validation images per group.
    """

    def on_evaluation_end(self, trainer: Run, algorithm: Any, metrics: Metrics) -> None:
        """Add both scalars to the metrics of an evaluation on validation images."""
        if "val/accuracy" not in metrics or not algorithm.group_means():
            return
        accuracies, shares = [], []
        for mean in algorithm.group_means():
            load_state(algorithm, {**algorithm.server.model(), **mean})
            scores = self._scores(trainer, algorithm)
            accuracies.append(float(scores["accuracy"]))
            shares.append(float(scores["largest_class_share"]))
        load_state(algorithm, algorithm.evaluated_model())
        metrics["group/accuracy_min"] = min(accuracies)
        metrics["group/largest_class_share"] = max(shares)

    @staticmethod
    def _scores(trainer: Run, algorithm: FederatedAlgorithm) -> dict[str, Tensor]:
        """The task's metrics of the working module."""
        classes = trainer.datamodule.num_classes
        batches = trainer.datamodule.evaluation_batches(
            "validate", trainer.dtype, shard=(trainer.global_rank, trainer.world_size)
        )
        scores = EvaluationMetrics([], classes, trainer.world_size, algorithm.task)
        with evaluating(algorithm), trainer.fabric.autocast():
            for x, y in islice(batches, 1 if trainer.fast_dev_run else None):
                scores.update(algorithm(x), y)
        return scores.compute(trainer.gather)
