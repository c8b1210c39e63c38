"""The trial of an evaluation before the first round."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch
from torch import nn

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

    The samples are the first test sample of every class, and 64 others.

    Args:
        data: The data, on the device.
        network: The model, from samples to outputs.
        metrics: Those of ``trainer.metrics``.
        dtype: The floating type of the samples.

    Raises:
        ValueError: Names the metric.
    """
    task = data.task
    scores = EvaluationMetrics(metrics, data.num_classes, task=task)
    labels = data.test_labels
    if not scores.names or not len(labels):
        return
    strata = task.strata(labels, data.num_classes)
    rows = {*torch.linspace(0, len(labels) - 1, _OTHERS).long().tolist()}
    rows |= {int((strata == stratum).nonzero()[0]) for stratum in strata.unique()}
    outputs = []
    # Static batch norm has no statistics yet; metrics warn of classes that these samples lack.
    with evaluating(network, batch_statistics=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in data.evaluation_batches("test", dtype, indices=torch.tensor(sorted(rows))):
            outputs.append(network(x))
            scores.update(outputs[-1], y)
        scores.compute(lambda value: [value])
    predictions = torch.cat(outputs)
    if task.is_share and predictions.min() > 0 and predictions.max() < 1:
        _log.warning(
            "model.network: all outputs of the new network are between 0 and 1, as those of a "
            "Softmax or Sigmoid: leave such a last layer out, because the loss has it"
        )
