"""Evaluates the group means, the models that methods with several groups send to their clients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.batch_norm import evaluating
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
        accuracies = []
        shares = []
        for mean in algorithm.group_means():
            load_state(algorithm, {**algorithm.server.model(), **mean})
            right, counts = self._count(trainer, algorithm)
            accuracies.append(right / float(counts.sum()))
            shares.append(float(counts.max() / counts.sum()))
        load_state(algorithm, algorithm.evaluated_model())
        metrics["group/accuracy_min"] = min(accuracies)
        metrics["group/largest_class_share"] = max(shares)

    @staticmethod
    def _count(trainer: Run, algorithm: FederatedAlgorithm) -> tuple[float, Tensor]:
        """The number of right predictions of the working module, and of predictions of each class,
        over all ranks.
        """
        found = torch.zeros(trainer.datamodule.num_classes + 1)
        with evaluating(algorithm), trainer.fabric.autocast():
            for x, y in _validation_batches(trainer):
                predicted = algorithm(x).argmax(dim=-1)
                right = (predicted == y).sum().reshape(1)
                found = found.to(x.device) + torch.cat(
                    [right, F.one_hot(predicted, len(found) - 1).sum(dim=0)]
                )
        total = sum(part.cpu() for part in trainer.gather(found))
        assert isinstance(total, Tensor)
        return float(total[0]), total[1:]


def _validation_batches(trainer: Run) -> Iterator[tuple[Tensor, Tensor]]:
    ranks = (trainer.global_rank, trainer.world_size)
    batches = trainer.datamodule.evaluation_batches("validate", trainer.dtype, shard=ranks)
    return islice(batches, 1 if trainer.fast_dev_run else None)
