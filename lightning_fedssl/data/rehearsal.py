"""The trial of an evaluation before the first round."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.metrics.evaluation import EvaluationMetrics, MetricFactory, MetricName

_log = logging.getLogger(__name__)

_OTHERS = 64
"""Samples of a trial besides the first of every class."""


def rehearse(
    data: FederatedDataModule,
    network: nn.Module,
    metrics: Sequence[MetricName | MetricFactory],
    dtype: torch.dtype,
) -> None:
    """Evaluate some samples before the first round, so that a metric that fails is refused then.

    The samples are the first of every class, the first that is partly unknown, and 64 others.

    Args:
        data: The data, on the device.
        network: The model, from samples to outputs.
        metrics: Those of ``trainer.metrics``.
        dtype: The floating type of the samples.

    Raises:
        ValueError: Names the metric.
    """
    task = data.task
    stages: dict[Literal["validate", "test"], Tensor] = {"test": data.test_labels}
    if data.has_validation:
        stages["validate"] = data.validation_labels
    for stage, labels in stages.items():
        scores = EvaluationMetrics(metrics, data.num_classes, task=task)
        if not scores.names or not len(labels):
            continue
        strata = task.strata(labels, data.num_classes)
        unknown = ~task.known(labels).flatten(1).all(dim=1) if labels.dim() > 1 else strata < 0
        places = torch.linspace(0, len(labels) - 1, min(len(labels), _OTHERS)).long().tolist()
        for rows in [unknown, *(strata == stratum for stratum in strata.unique())]:
            places += rows.nonzero().flatten()[:1].tolist()
        chosen = torch.tensor(sorted(set(places)))
        outputs = []
        with (
            evaluating(network, batch_statistics=True),
            torch.random.fork_rng([] if labels.device.type == "cpu" else None),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of classes that these samples do not have
            for x, y in data.evaluation_batches(stage, dtype, only=chosen):
                outputs.append(network(x))
                scores.update(outputs[-1], y)
            scores.compute(lambda value: [value])
        found = torch.cat(outputs)
        if task.is_share and found.min() > 0 and found.max() < 1:
            _log.warning(
                "model.network: all outputs of the new network are between 0 and 1, as those of "
                "a Softmax or Sigmoid: leave such a last layer out, because the loss has it"
            )
