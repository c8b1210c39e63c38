"""Logs the simulated time of rounds on the devices and links of a system model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.system import Usage

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import ClientUpdate, Direction

_log = logging.getLogger(__name__)


class SystemClock(FederatedCallback):
    """Logs the time of rounds on the trainer's ``system``. A trainer with this key adds the
    callback.

    ``system/round_s`` is the time of the round. ``system/compute_s`` and ``system/transfer_s`` are
    the times of its slowest client, and ``system/server_s`` is the time of the server. Clients that
    dropped out do not count. ``system/seconds``, ``system/download_bytes`` and
    ``system/upload_bytes`` are sums over all rounds so far. ``system/step_work`` is the mean work
    of a client's step in plain steps. Only transfers and training steps take
    simulated time; labelling before the first step, statistics, averaging and evaluation take none.

    Raises:
        ValueError: In ``fit``, if the trainer has no ``system``.
    """

    saved = ("seconds", "downloaded", "uploaded")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.seconds = 0.0
        self.downloaded = 0
        self.uploaded = 0
        self._usages: dict[int, Usage] = defaultdict(Usage)
        self._server_steps = 0

    def on_train_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Warn if the rounds before the checkpoint were not timed."""
        if trainer.system is None:
            raise ValueError("the callback SystemClock needs the key trainer.system, which adds it")
        if trainer.round_index and not self.seconds:
            _log.warning(
                "trainer.system: the checkpoint is from a run without this key; system/* are sums "
                "from round %d on",
                trainer.round_index + 1,
            )

    def on_transfer(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        client: int,
        direction: Direction,
        sizes: Mapping[str, int],
    ) -> None:
        """Add the bytes to those of the client."""
        self._usages[client] += Usage(**{direction: sum(sizes.values())})

    def on_client_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Add the client's steps and their work."""
        work = update.num_steps * trainer.run.step_work[update.client]
        self._usages[update.client] += Usage(steps=update.num_steps, work=work)

    def on_server_batch_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, step: int
    ) -> None:
        """Count the server's steps, which every rank repeats."""
        self._server_steps += 1

    def on_global_model(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Log the time of the round, from the transfers and steps of all ranks."""
        usages: dict[int, Usage] = defaultdict(Usage)
        for part in trainer.gather(dict(self._usages)):
            for client, usage in part.items():
                usages[client] += usage
        total = sum(usages.values(), Usage())
        if isinstance(algorithm, JointAlgorithm):
            self._server_steps += max((usage.steps for usage in usages.values()), default=0)
        assert trainer.system is not None
        duration = trainer.system.round_duration(
            trainer.seed,
            trainer.round_index,
            usages,
            self._server_steps,
            server_in_parallel=getattr(algorithm, "server_phase", "") == "parallel",
            left_out=[k for k, outcome in trainer.participation.items() if outcome == "dropped"],
        )
        self._usages = defaultdict(Usage)
        self._server_steps = 0
        self.seconds += duration.total
        self.downloaded += total.down
        self.uploaded += total.up
        if not trainer.is_global_zero:
            return  # the mean over ranks is then bitwise identical to the value of rank 0
        values = {
            "round_s": duration.total,
            "compute_s": duration.compute,
            "transfer_s": duration.transfer,
            "server_s": duration.server,
            "seconds": self.seconds,
            "download_bytes": self.downloaded,
            "upload_bytes": self.uploaded,
        }
        if total.steps:
            values["step_work"] = total.work / total.steps
        for name, value in values.items():
            trainer.log(f"system/{name}", value)
