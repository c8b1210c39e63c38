"""Evaluation of the global model, and the commands ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.class_shares import drawn_to
from lightning_fedssl.data.datasets import plural
from lightning_fedssl.functional.by_name import prefixed
from lightning_fedssl.metrics.evaluation import EvaluationMetrics, scalars
from lightning_fedssl.metrics.rounds import MetricCollector, Metrics
from lightning_fedssl.run import Run
from lightning_fedssl.state import load_state
from lightning_fedssl.storage import run_folder
from lightning_fedssl.trainer import checkpointing

_log = logging.getLogger(__name__)


def run_command(trainer: Run, stage: str) -> Metrics:
    """Run ``validate`` or ``test``; for ``predict`` only load the model (see :func:`predict`).

    Args:
        trainer: The trainer; its ``ckpt_path`` is the checkpoint to use, the current model if left
            out.
        stage: The command.

    Returns:
        The scalars; empty for ``predict``.

    Raises:
        ValueError: If the model was trained on data that do not fit, or there are no images to
            ``validate`` on.
    """
    ckpt_path = trainer.ckpt_path
    if ckpt_path is None:
        done = trainer.round_index
        of = (
            f"of round {done}"
            if done
            else "as they are: untrained, unless you or model.init_from have loaded some"
        )
        _log.warning("no ckpt_path given: the weights are %s", of)
    else:
        loaded = checkpointing.load_model(trainer, ckpt_path)
        checkpointing.load_personal(trainer.algorithm, loaded, ckpt_path)
    if origin := trainer.algorithm.origin:
        checkpointing.check_same_samples(
            trainer.datamodule, origin, ckpt_path, trainer.allow_changed
        )
        # On another partition, images of training could be among the validation images.
        if stage == "validate":
            checkpointing.check_same_data(trainer.seed, trainer.datamodule, origin, ckpt_path)
    if stage == "predict":
        return {}
    if stage == "validate" and not trainer.datamodule.has_validation:
        raise ValueError(
            "data.validation is 0: there is no validation data; give a fraction above 0, or test"
        )
    metrics = evaluate(trainer, "validate" if stage == "validate" else "test")
    trainer.log_metrics(metrics)
    return metrics


def evaluate(trainer: Run, stage: Literal["validate", "test"]) -> Metrics:
    """Evaluate the global model on the validation or test images.

    Each rank takes its share of the batches.
    """
    algorithm = trainer.algorithm
    prefix = "val" if stage == "validate" else "test"
    ranks = trainer.world_size
    classes = trainer.datamodule.num_classes
    scores = EvaluationMetrics(trainer.metrics, classes, ranks, algorithm.task)
    trainer.folder.use()
    _load_evaluated_model(trainer)
    step = algorithm.validation_step if stage == "validate" else algorithm.test_step
    collector = MetricCollector(ranks)
    trainer.scalars.add_logged()  # what follows is of the evaluation
    devices: list[int] | None = [] if trainer.fabric.device.type == "cpu" else None
    with torch.no_grad(), trainer.fabric.autocast(), torch.random.fork_rng(devices):
        key = sampling.derive_key(trainer.seed, stage, trainer.round_index)
        torch.manual_seed(key)  # for dropout
        for index, batch in enumerate(_batches(trainer, stage)):
            # In the order of the data, in which the batches' values are added.
            number = index * ranks + trainer.global_rank
            logits = step(batch, index)
            for name, value, weight, _ in algorithm.logged:
                collector.update(name, value, weight, number)
            algorithm.logged.clear()
            collector.commit(number)
            if logits is not None:
                scores.update(logits, batch[1])
    values = prefixed(f"{prefix}/", scores.compute(trainer.gather))
    trainer.scalars.metrics.update(values)
    metrics = scalars(values) | collector.compute(trainer.gather)
    trainer.hooks.call("on_evaluation_end", metrics)
    return metrics


def predict(trainer: Run) -> tuple[Tensor, str | None]:
    """Compute class probabilities of the test images, or of new images.

    Rank 0 writes them to ``predictions.csv``; the classes of pixels as PNG files to the folder
    ``predictions``.

    Every rank predicts all images, so that the rows have the order of the data.

    Returns:
        The probabilities ``(images, classes)``, and the file.
    """
    classes = trainer.datamodule.spec.class_names
    files = trainer.datamodule.predict_files()
    _load_evaluated_model(trainer)
    with torch.no_grad(), trainer.fabric.autocast():
        batches = enumerate(trainer.datamodule.predict_batches(trainer.dtype))
        rows = [trainer.algorithm.predict_step(batch, index).cpu() for index, batch in batches]
    trainer.folder.use()  # not before all images could be read
    predictions = torch.cat(rows)
    if trainer.predict_shares is not None:
        predictions = drawn_to(predictions, trainer.predict_shares, classes)
    if not trainer.fabric.is_global_zero or trainer.fast_dev_run:
        return predictions, None
    path = Path(trainer.folder.log_dir or trainer.default_root_dir) / "predictions.csv"
    if trainer.datamodule.task.per_pixel:
        path = path.with_suffix("")
        sizes = trainer.datamodule.predict_sizes()
        run_folder.write_masks(predictions.argmax(dim=1), path, files, sizes)
    else:
        one_class = "one class" in trainer.datamodule.task.gives
        run_folder.write_predictions(predictions, path, classes, files, one_class)
    count = plural(len(predictions), trainer.datamodule.spec.noun)
    _log.info("predictions of %s: %s", count, path)
    return predictions, str(path)


def _load_evaluated_model(trainer: Run) -> None:
    trainer.hooks.call("on_evaluation_start")
    load_state(trainer.algorithm, trainer.algorithm.evaluated_model())
    trainer.algorithm.eval()


def _batches(trainer: Run, stage: Literal["validate", "test"]) -> Iterator[tuple[Tensor, Tensor]]:
    ranks = (trainer.global_rank, trainer.world_size)
    batches = iter(trainer.datamodule.evaluation_batches(stage, trainer.dtype, shard=ranks))
    return islice(batches, 1) if trainer.fast_dev_run else batches
