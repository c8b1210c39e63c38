"""Evaluation of the global model, and the commands ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.statistics import plural
from lightning_fedssl.metrics import MetricCollector
from lightning_fedssl.state import load_state
from lightning_fedssl.trainer import checkpointing, run_folder
from lightning_fedssl.trainer.evaluation_metrics import EvaluationMetrics, scalars
from lightning_fedssl.trainer.run import Run

_log = logging.getLogger(__name__)


def run_command(run: Run, ckpt_path: Path | None) -> dict[str, float]:
    """Run ``validate``, ``test`` or ``predict``.

    Args:
        run: The run; ``run.stage`` is the command.
        ckpt_path: The checkpoint to use; the current model if left out.

    Returns:
        The scalars; empty for ``predict``.

    Raises:
        ValueError: If the model was trained on data that do not fit, or there are no images to ``validate`` on.
    """
    if ckpt_path is None:
        _log.warning("no ckpt_path given: %s", _weights_at_hand(run))
    else:
        checkpointing.load_model(run, ckpt_path)
    if origin := run.algorithm.origin:
        checkpointing.check_same_samples(run, origin, ckpt_path)
        if run.stage == "validate":  # on another partition, images of training could be among the validation images
            checkpointing.check_same_data(run, origin, ckpt_path)
    if run.stage == "predict":
        predict(run)
        return {}
    if run.stage == "validate" and not run.datamodule.has_validation:
        raise ValueError("data.validation is 0: there is no validation data; give a fraction above 0, or test")
    metrics = evaluate(run, "validate" if run.stage == "validate" else "test")
    run.log_metrics(metrics)
    return metrics


def _weights_at_hand(run: Run) -> str:
    """Which weights are evaluated without a checkpoint."""
    if done := run.status.round_index:
        return f"using the model after round {done}"
    if run.algorithm.init_from is not None:
        return f"using the weights of model.init_from, {run.algorithm.init_from}, unless others were loaded since"
    return (
        "the weights are untrained, unless you have loaded some, because this trainer has not trained the model; "
        "ckpt_path best, or last, is that of the newest run"
    )


def evaluate(run: Run, stage: Literal["validate", "test"]) -> dict[str, float]:
    """Evaluate the global model on the validation or test images; each rank takes its share of the batches."""
    algorithm, prefix = run.algorithm, "val" if stage == "validate" else "test"
    scores = EvaluationMetrics(run.metrics, run.datamodule.num_classes, run.fabric.world_size)
    run.folder.use()
    _load_evaluated_model(run)
    step = algorithm.validation_step if stage == "validate" else algorithm.test_step
    rank, ranks = run.fabric.global_rank, run.fabric.world_size
    of_round, run.collector = run.collector, MetricCollector(ranks)
    devices = [] if run.fabric.device.type == "cpu" else None
    with torch.no_grad(), run.fabric.autocast(), torch.random.fork_rng(devices):
        torch.manual_seed(sampling.derive_key(run.seed, stage, run.status.round_index))  # for dropout
        for index, batch in enumerate(_batches(run, stage)):
            number = index * ranks + rank  # in the order of the data, in which the batches' values are added
            algorithm.collector = partial(run.collector.update, client=number)
            logits = step(batch, index)
            run.collector.commit(number)
            if logits is not None:
                scores.update(logits, batch[1])
    values = {f"{prefix}/{name}": value for name, value in scores.compute(run.gather).items()}
    run.status.metric_values.update(values)
    metrics = scalars(values) | run.collector.compute(run.gather)
    run.collector = of_round
    algorithm.collector = run.log
    run.call("on_evaluation_end", metrics)
    return metrics


def predict(run: Run) -> None:
    """Compute class probabilities of the test images, or of new images; rank 0 writes them to ``predictions.csv``.

    Every rank predicts all images, so that the rows have the order of the data.
    """
    classes, files = run.datamodule.spec.class_names, run.datamodule.predict_files()
    _load_evaluated_model(run)
    with torch.no_grad(), run.fabric.autocast():
        batches = enumerate(run.datamodule.predict_batches(run.trainer.dtype))
        rows = [_predicted(run, batch, index).cpu() for index, batch in batches]
    run.folder.use()  # not before all images could be read
    run.status.predictions, run.status.predictions_file = torch.cat(rows), None
    if run.fabric.is_global_zero and not run.trainer.fast_dev_run:
        path = Path(run.folder.log_dir or run.trainer.default_root_dir) / "predictions.csv"
        run_folder.write_predictions(run.status.predictions, path, classes, files)
        run.status.predictions_file = str(path)
        count = plural(len(run.status.predictions), run.datamodule.spec.noun)
        _log.info("class probabilities of %s: %s", count, path)


def _predicted(run: Run, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
    return run.algorithm.predict_step(batch, index)


def _load_evaluated_model(run: Run) -> None:
    run.call("on_evaluation_start")
    load_state(run.algorithm, run.algorithm.evaluated_model())
    run.algorithm.eval()


def _batches(run: Run, stage: Literal["validate", "test"]) -> Iterator[tuple[Tensor, Tensor]]:
    ranks = (run.fabric.global_rank, run.fabric.world_size)
    batches = iter(run.datamodule.evaluation_batches(stage, run.trainer.dtype, shard=ranks))
    return islice(batches, 1) if run.trainer.fast_dev_run else batches
