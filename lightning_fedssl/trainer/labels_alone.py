"""Trains the bound of a run: its labels alone, in a run of their own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from lightning_fedssl.algorithms import Supervised
from lightning_fedssl.callbacks import RoundProgress
from lightning_fedssl.functional.by_name import mapped
from lightning_fedssl.metrics.rounds import Metrics
from lightning_fedssl.run import Run


def train(run: Run, make_trainer: Callable[..., Any], steps: int, folder: str) -> Metrics:
    """See :meth:`Run.train_labels_alone`.

    Args:
        run: The run whose labels are trained on.
        make_trainer: The class of its trainer.
        steps: Steps of the server in the run.
        folder: Where the checkpoints are written.
    """
    rounds = run.round_index
    device = run.fabric.device
    alone = make_trainer(
        max_rounds=rounds,
        clients_per_round=1,
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=run.precision,
        logger=False,
        check_val_every_n_rounds=run.check_val_every_n_rounds,
        deterministic=run.deterministic,
        callbacks=RoundProgress("labels alone"),
        enable_progress_bar=run.enable_progress_bar and run.is_global_zero,
        default_root_dir=folder,
    )
    log = logging.getLogger("lightning_fedssl")
    level = log.level
    log.setLevel(logging.ERROR)  # the run itself has warned of its data
    try:
        alone.fit(Supervised.of(run.algorithm, math.ceil(steps / rounds)), run.datamodule)
    finally:
        log.setLevel(level)
    return mapped(float, alone.callback_metrics)
