"""Evaluation of the global model, and the commands ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.class_shares import drawn_to
from lightning_fedssl.data.datasets import plural
from lightning_fedssl.functional.dictionaries import add_prefix
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.metrics.evaluation import scalars
from lightning_fedssl.metrics.rounds import MetricCollector, Metrics, Scalars
from lightning_fedssl.run import Run
from lightning_fedssl.state import load_state
from lightning_fedssl.storage import run_folder
from lightning_fedssl.trainer import checkpointing

_log = logging.getLogger(__name__)


def run_command(run: Run, stage: str) -> Metrics:
    """Run ``validate`` or ``test``; for ``predict`` only load the model (see :func:`predict`).

    Args:
        run: The run; its ``ckpt_path`` is the checkpoint to use, the current model if left
            out.
        stage: The command.

    Returns:
        The scalars; empty for ``predict``.

    Raises:
        ValueError: If the model was trained on data that do not fit, or there are no images to
            ``validate`` on.
    """
    ckpt_path = run.ckpt_path
    if ckpt_path is None:
        _log.warning(
            "no ckpt_path given: the weights are %s",
            f"of round {run.round.index}"
            if run.round.index
            else "as they are: untrained, unless you or model.init_from have loaded some",
        )
    else:
        loaded = checkpointing.load_model(run, ckpt_path)
        checkpointing.load_personal(run.algorithm, loaded, ckpt_path)
    if origin := run.algorithm.origin:
        checkpointing.check_same_samples(
            run.datamodule, origin, ckpt_path, run.settings.allow_changed
        )
        # On another partition, images of training could be among the validation images.
        if stage == "validate":
            checkpointing.check_same_data(run.seed, run.datamodule, origin, ckpt_path)
    if stage == "predict":
        return {}
    if stage == "validate" and not run.datamodule.has_validation:
        raise ValueError(
            "data.validation is 0: there is no validation data; give a fraction above 0, or test"
        )
    metrics = evaluate(run, "validate" if stage == "validate" else "test")
    run.log_metrics(metrics)
    return metrics


def evaluate(run: Run, stage: Literal["validate", "test"]) -> Metrics:
    """Evaluate the global model on the validation or test images.

    Each rank takes its share of the batches.
    """
    algorithm, data, keys = run.algorithm, run.datamodule, run.settings
    prefix = "val" if stage == "validate" else "test"
    rank, ranks = run.fabric.global_rank, run.fabric.world_size
    step = algorithm.validation_step if stage == "validate" else algorithm.test_step
    run.folder.use()
    _load_evaluated_model(run.hooks, run.scalars, run.algorithm)
    collector = MetricCollector(ranks)
    devices: list[int] | None = [] if run.fabric.device.type == "cpu" else None
    with torch.no_grad(), run.fabric.autocast(), torch.random.fork_rng(devices):
        key = sampling.derive_key(run.seed, stage, run.round.index)
        torch.manual_seed(key)  # for dropout
        batches = iter(data.evaluation_batches(stage, keys.dtype, shard=(rank, ranks)))
        for index, batch in enumerate(islice(batches, keys.max_steps)):
            # In the order of the data, in which the batches' values are added.
            number = index * ranks + rank
            logits = step(batch, index)
            for name, value, weight, _ in algorithm.logged:
                collector.update(name, value, weight, number)
            algorithm.logged.clear()
            collector.commit(number)
            if logits is not None:
                run.metrics.update(logits, batch[1])
    computed, means = run.metrics.compute(run.gather), collector.compute(run.gather)
    values = add_prefix(f"{prefix}/", computed)
    run.scalars.metrics.update(values)
    metrics = scalars(values) | means
    if not math.isfinite(metrics.get(f"{prefix}/loss", 0.0)):
        _log.warning(
            "%s/loss is not finite: for some samples the model has no finite outputs; scale the "
            "inputs (data.normalize), or train with precision: 32",
            prefix,
        )
    run.hooks.call("on_evaluation_end", metrics)
    return metrics


def predict(run: Run, shares: Mapping[str, Any] | None) -> tuple[Tensor, str | None]:
    """Compute class probabilities of the test images, or of new images.

    Rank 0 writes them to ``predictions.csv``; the classes of pixels as PNG files to the folder
    ``predictions``.

    Every rank predicts all images, so that the rows have the order of the data.

    Args:
        run: The run.
        shares: How frequent the classes are among the images, if known.

    Returns:
        The probabilities ``(images, classes)``, and the file.
    """
    data, keys = run.datamodule, run.settings
    classes = data.spec.class_names
    files = data.predict_files()
    _load_evaluated_model(run.hooks, run.scalars, run.algorithm)
    with torch.no_grad(), run.fabric.autocast():
        batches = enumerate(data.predict_batches(keys.dtype))
        rows = [run.algorithm.predict_step(batch, index).cpu() for index, batch in batches]
    run.folder.use()  # not before all images could be read
    predictions = torch.cat(rows)
    one_class = "one class" in data.task.gives
    if shares is not None:
        predictions = drawn_to(predictions, shares, classes, one_class)
    if not run.fabric.is_global_zero or keys.fast_dev_run:
        return predictions, None
    path = Path(run.folder.log_dir or keys.default_root_dir) / "predictions.csv"
    if data.task.per_pixel:
        path = path.with_suffix("")
        run_folder.write_masks(predictions.argmax(dim=1), path, files, data.predict_sizes())
    else:
        run_folder.write_predictions(predictions, path, classes, files, one_class)
    _log.info("predictions of %s: %s", plural(len(predictions), data.spec.noun), path)
    return predictions, str(path)


def _load_evaluated_model(hooks: Hooks, logged: Scalars, algorithm: FederatedAlgorithm) -> None:
    hooks.call("on_evaluation_start")
    logged.add_logged()  # what follows is of the evaluation
    load_state(algorithm, algorithm.evaluated_model())
    algorithm.eval()
