"""Trains what a run is compared with, in a run of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.supervised import Supervised
from lightning_fedssl.callbacks import RoundProgress
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.run import Beside, TrainerView


def train(
    run: TrainerView,
    make_trainer: Callable[..., Any],
    folder: str,
    steps: int | None = None,
    rows: Tensor | None = None,
) -> Beside:
    """See :meth:`TrainerView.train_beside`.

    Args:
        run: The trainer of the run.
        make_trainer: The class of its trainer.
        folder: Where the checkpoints are written.
        steps: See there.
        rows: See there.
    """
    rounds, clients, data = run.round_index, 1, run.datamodule
    method: FederatedAlgorithm
    if rows is not None:
        method, data, clients = run.algorithm.anew(), data.with_labels(rows), run.cohort_size
    elif steps:
        method = Supervised.bound_of(run.algorithm, math.ceil(steps / rounds))
    else:
        method, rounds = Supervised.linear(run.algorithm), 1
    device = run.fabric.device
    trainer = make_trainer(
        max_rounds=rounds,
        clients_per_round=clients,
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=run.precision,
        logger=False,
        check_val_every_n_rounds=run.check_val_every_n_rounds,
        deterministic=run.deterministic,
        callbacks=RoundProgress("labels alone"),
        enable_progress_bar=bool(run.enable_progress_bar and run.is_global_zero and steps),
        default_root_dir=folder,
    )
    log = logging.getLogger("lightning_fedssl")
    level = log.level
    log.setLevel(logging.ERROR)  # the run itself has warned of its data
    try:
        trainer.fit(method, data)
    finally:
        log.setLevel(level)
    return Beside(map_values(float, trainer.callback_metrics), method)
