"""The command ``replay``: trains a rejected client of a past round again, and reports where its numbers went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.local_training import LocalTraining
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer import checkpointing, fit_loop
from lightning_fedssl.trainer.acceptance import reason_to_reject
from lightning_fedssl.trainer.callback_list import CallbackList
from lightning_fedssl.trainer.federation import SimulatedFederation, Stacks
from lightning_fedssl.trainer.number_watch import NumberWatch, ReplayReport
from lightning_fedssl.trainer.run import Run


class _ReplayedError(Exception):
    """The client has trained again: nothing of the round is left to do."""


class ReplayFederation(SimulatedFederation):
    """A federation in whose last round one client alone trains, watched; the rounds before are as in ``fit``.

    In split learning the other clients of the round train, too, because all of them meet at the server at every step.

    Args:
        run: The run.
        report: Names round and client, and receives what is found.
    """

    def __init__(self, run: Run, report: ReplayReport) -> None:
        super().__init__(run)
        self.report = report
        self.watch = NumberWatch(report)

    @property
    def _is_last(self) -> bool:
        return self.round_index == self.report.round

    def start_round(self) -> None:
        """Refuse a client that did not take part."""
        super().start_round()
        if self._is_last and self.report.client not in self.cohort:
            clients = ", ".join(map(str, sorted(self.cohort)))
            raise ValueError(
                f"client {self.report.client} did not take part in round {self.report.round}; give one of {clients}"
            )

    def client_judged(self, client: int, reason: str | None) -> None:
        """Store the reason why split learning excludes the client."""
        super().client_judged(client, reason)
        if self._is_last and client == self.report.client and reason is not None:
            self.report.outcome = f"the client {reason}"

    def _accepted(self, train: Callable[[Stacks], Iterator[ClientUpdate]]) -> Iterator[ClientUpdate]:
        if not self._is_last:
            yield from super()._accepted(train)
            return
        algorithm = self.run.algorithm
        algorithm.clients.watch_changes()
        present = self.participation.start(self.cohort)
        clients = present if isinstance(algorithm, JointAlgorithm) else [self.report.client]
        with self.watch.watching(algorithm):
            for update in train([[client] for client in clients]):
                if update.client == self.report.client:
                    self.report.outcome = outcome(
                        update, self._weights_sent_to(update.client), self.run.quarantine, self.run.lr_factor
                    )
        raise _ReplayedError


def outcome(update: ClientUpdate, sent: State, factor: float | None, lr_factor: float = 1.0) -> str:
    """Whether the server would accept an update, as text; the median of the round's movements is not known here.

    Args:
        update: The update.
        sent: The weights that the client was sent.
        factor: ``trainer.quarantine``.
        lr_factor: The schedule's factor of the learning rate.
    """
    if (reason := reason_to_reject(update)) is not None:
        return f"the client {reason}, so the server rejects its update"
    own = {name: sent[name] for name in update.parameters if name in sent}
    moved = float(torch.stack([(update.parameters[name] - t).norm() for name, t in own.items()]).norm())
    norm = float(torch.stack([t.norm() for t in own.values()]).norm())
    text = f"the update is finite; it moved the weights by {moved:.4g}, and their own norm is {norm:.4g}"
    if factor is None or moved <= lr_factor * norm:
        return f"{text}: the server accepts it"
    return f"{text}: the server rejects it if this is more than {factor:g} times the median of the round"


def replay(run: Run, ckpt_path: Path | None, report: ReplayReport) -> ReplayReport:
    """Run the rounds between a checkpoint and the round of a report, and in that round the client of the report alone.

    Args:
        run: The run; its callbacks take part, except those that write checkpoints.
        ckpt_path: A checkpoint of an earlier round; the run is repeated from round 1 if left out.
        report: Names round and client, and receives what is found.

    Raises:
        ValueError: If the round or the client does not fit.
    """
    if not 1 <= report.round <= run.trainer.max_rounds:
        raise ValueError(
            f"--round is {report.round}: give a round from 1 to trainer.max_rounds {run.trainer.max_rounds}"
        )
    if run.fabric.world_size > 1:
        raise ValueError("replay trains one client in one process: give --trainer.devices 1")
    federation = ReplayFederation(run, report)
    run.algorithm.federation = federation
    run.local_training = LocalTraining(1)
    callbacks = [c for c in run.hooks.callbacks if not isinstance(c, (FederatedCheckpoint, Checkpoint))]
    run.hooks = CallbackList(callbacks, run.trainer, run.algorithm)
    run.forget_earlier_run()
    first = 1
    if ckpt_path is not None:
        first = checkpointing.resume(run, ckpt_path) + 1
        if first > report.round:
            raise ValueError(
                f"ckpt_path: {ckpt_path} is of round {first - 1}, but round {report.round} needs a checkpoint of an "
                "earlier round: give one, or leave ckpt_path out to repeat the run from round 1"
            )
    for hook in ("on_fit_start", "on_train_start"):
        run.call(hook)
    run.hooks = CallbackList([*callbacks, federation.watch], run.trainer, run.algorithm)
    try:
        for run.status.round_index in range(first, report.round + 1):
            fit_loop.run_round(run, federation)
    except _ReplayedError:
        return report
    raise ValueError(f"no client trains in round {report.round} of {type(run.algorithm).__name__}")
