"""The ServerApp: the command ``fit`` with a federation whose clients are Flower's nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.deployment.federation import STATE, DeployedFederation
from lightning_fedssl.deployment.flower.channel import FlowerChannel
from lightning_fedssl.deployment.own_data import ServerData
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.storage.files import lock_folder
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

    Raises:
        ValueError: If another server trains the run that would be resumed.
        TimeoutError: If too few clients connect.
    """
    trainer, algorithm, datamodule = parts
    channel = FlowerChannel(
        grid,
        timeout=float(run_config.get("answer-timeout", 3600)),
        connect_timeout=float(run_config.get("connect-timeout", 3600)),
        repeat_after=float(run_config.get("repeat-after", 60)),
    )
    wait_for = int(run_config.get("wait-for-clients", 0)) or datamodule.num_clients
    with _Locks() as locks:
        ckpt_path = unfinished(trainer, algorithm) if run_config.get("resume", True) else None
        if ckpt_path:
            locks.hold(ckpt_path.parent.parent)
            _log.info("resuming %s", ckpt_path)
        if isinstance(datamodule, ServerData):
            while len(channel.connected()) < wait_for:
                channel.wait()
            datamodule.client_sizes = channel.client_sizes()

        def make_federation(trainer: FederatedTrainer) -> DeployedFederation:
            if not trainer.fast_dev_run:  # which writes no file
                locks.hold(Path(trainer.log_dir or trainer.default_root_dir))
            return DeployedFederation(trainer, channel, wait_for)

        trainer.make_federation = make_federation
        trainer.fit(algorithm, datamodule, ckpt_path=ckpt_path)
    accuracy = trainer.callback_metrics.get("test/accuracy")
    if accuracy is not None:  # a run that a signal has stopped has none
        # A line of its own, so that it can be found in the log of the server.
        print(f"test/accuracy {float(accuracy):.4f}", flush=True)


class _Locks:
    """A context in which the folders of a run are locked: two servers of one run would destroy its clients' states."""

    def __init__(self) -> None:
        self._held: dict[Path, FileLock] = {}

    def __enter__(self) -> _Locks:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._held.values():
            descriptor.release()

    def hold(self, folder: Path) -> None:
        """Lock a folder; one that is locked already stays so.

        Raises:
            ValueError: If another server trains in it.
        """
        folder = folder.resolve()
        if folder in self._held:
            return
        descriptor = lock_folder(folder)
        if descriptor is None:
            raise ValueError(
                f"the run in {folder} is training now: wait for its end, or end it with flwr stop; "
                "resume=false in the run configuration starts another run"
            )
        self._held[folder] = descriptor


def unfinished(trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> Path | None:
    """The last checkpoint below ``default_root_dir``, if its run is a deployment of the method with rounds left.

    The log says why a checkpoint is not resumed.
    """
    try:
        path = checkpoint_file.find("last", Path(trainer.default_root_dir))
    except FileNotFoundError:
        return None
    if reason := _obstacle(checkpoint_file.load(path), trainer, algorithm):
        _log.info("a new run begins, because the run of %s %s", path, reason)
        return None
    return path


def _obstacle(found: checkpoint_file.Checkpoint, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> str:
    """Why a run cannot resume a checkpoint; empty if it can."""
    method = type(algorithm).__name__
    if STATE not in found["federation"]["extra"]:
        return "is a simulation"
    if found["algorithm"] != method:
        return f"is of the method {found['algorithm']}, and the app's is {method}"
    return "has done all its rounds" if found["round"] >= trainer.max_rounds else ""
