"""The ServerApp: the command ``fit`` with a federation whose clients are Flower's nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.deployment.federation import DeployedFederation
from lightning_fedssl.deployment.flower.channel import FlowerChannel
from lightning_fedssl.deployment.own_data import ServerData
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer import FederatedTrainer

_log = logging.getLogger(__name__)

Parts = tuple[FederatedTrainer, FederatedAlgorithm, FederatedDataModule]
"""The trainer, algorithm and data that a configuration describes."""


def make_server_app(make_parts: Callable[[Mapping[str, Any]], Parts]) -> ServerApp:
    """The ServerApp of a deployment.

    Args:
        make_parts: Makes trainer, algorithm and data from Flower's run configuration.
    """
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        """Train; resume the last run if it has not finished."""
        fit_on_grid(grid, context.run_config, make_parts(context.run_config))

    return app


def fit_on_grid(grid: Grid, run_config: Mapping[str, Any], parts: Parts) -> None:
    """Train with the nodes of a grid.

    Args:
        grid: Flower's grid.
        run_config: The keys ``wait-for-clients`` (0: all), ``answer-timeout``, ``connect-timeout`` and
            ``repeat-after`` in seconds, and ``resume``.
        parts: Trainer, algorithm and data.
    """
    trainer, algorithm, datamodule = parts
    channel = FlowerChannel(
        grid,
        timeout=float(run_config.get("answer-timeout", 3600)),
        connect_timeout=float(run_config.get("connect-timeout", 3600)),
        repeat_after=float(run_config.get("repeat-after", 60)),
    )
    wait_for = int(run_config.get("wait-for-clients", 0)) or datamodule.num_clients
    if isinstance(datamodule, ServerData):
        while len(channel.connected()) < wait_for:
            channel.wait()
        datamodule.client_sizes = channel.client_sizes()
    trainer.make_federation = partial(DeployedFederation, channel=channel, wait_for=wait_for)
    ckpt_path = unfinished(trainer) if run_config.get("resume", True) else None
    if ckpt_path:
        _log.info("resuming %s", ckpt_path)
    trainer.fit(algorithm, datamodule, ckpt_path=ckpt_path)
    # A line of its own, so that it can be found in the log of the server.
    print(f"test/accuracy {float(trainer.callback_metrics['test/accuracy']):.4f}", flush=True)


def unfinished(trainer: FederatedTrainer) -> Path | None:
    """The last checkpoint below ``default_root_dir``, if its run has rounds left."""
    try:
        path = checkpoint_file.find("last", Path(trainer.default_root_dir))
    except FileNotFoundError:
        return None
    return path if checkpoint_file.load(path)["round"] < trainer.max_rounds else None
