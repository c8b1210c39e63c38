"""Keeps what a run does, for the page that shows it."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.answer import accuracy_error
from lightning_fedssl.callbacks.pseudo_label_quality import PseudoLabelQuality, Wrong
from lightning_fedssl.report import FILE_NAME, page

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import ClientUpdate, Direction

_log = logging.getLogger(__name__)

PARTS = 8
"""The number of parts of a run whose pseudo-labels are counted apart."""

_COST = 50
"""A write of the page waits for this multiple of the time that the write before has taken: 2 %."""

_PAUSE = 2.0
"""Seconds between two writes, at least."""

Counts = dict[int, Tensor]

_DRAWN, _USED, _STEPS, _DOWN, _UP = range(5)


def _begins(phase: str) -> Any:
    """A hook at which a phase of a round begins, and the one before ends."""

    def hook(self: RunReport, *arguments: Any) -> None:
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    return hook


class RunReport(FederatedCallback):
    """Writes ``report.html`` into the run folder: one page about the run, rewritten as it goes on.

    The page needs no network. It is written before the first round, after rounds (in at most 2 % of
    the time), and when the run ends, is stopped or fails. While the run goes on, a browser loads it
    again every few seconds. A resumed run continues tables and, with a CSV file of scalars, curves;
    times and warnings are those of the last command. Part of every run with a folder. It does not
    affect training; true labels are used to count wrong pseudo-labels
    (:class:`PseudoLabelQuality`).

    Attributes:
        clients: Of each client: rounds for which it was drawn, rounds in which its update was used,
            steps, bytes received and bytes sent, ``(5,)`` int64.
        tables: Pseudo-labels of each eighth of the run, by its number from 0:
            :attr:`PseudoLabelQuality.table`, summed.
        wrong: The most confident wrong pseudo-labels of the last round that had labels.
        warnings: Warnings of the package.
        seconds: Time by phase; ``other`` is preparation, aggregation, statistics, files and the
            training of the labels alone.
    """

    saved = ("clients", "tables")

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._listener = _Listener(self.warnings)
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.clients: Counts = {}
        self.tables: Counts = {}
        self.wrong: list[Wrong] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self._phase = "other"
        self._since = time.perf_counter()
        self._round: Counter[tuple[int, int]] = Counter()
        self._next_write = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Listen to the warnings of the package."""
        self.warnings.clear()
        if stage == "fit" and trainer.is_global_zero:
            logging.getLogger("lightning_fedssl").addHandler(self._listener)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Listen no more."""
        logging.getLogger("lightning_fedssl").removeHandler(self._listener)

    # What is kept.

    on_server_phase_start = _begins("server")
    on_client_phase_start = _begins("clients")
    on_evaluation_start = _begins("evaluation")
    on_server_phase_end = on_aggregate = on_evaluation_end = on_train_end = _begins("other")

    def on_transfer(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        client: int,
        direction: Direction,
        sizes: Mapping[str, int],
    ) -> None:
        """Count the bytes of a client."""
        self._round[client, _DOWN if direction == "down" else _UP] += sum(sizes.values())

    def on_client_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Count the steps of a client."""
        self._round[update.client, _STEPS] += update.num_steps

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Add the clients of all ranks, and the pseudo-labels."""
        for client, outcome in trainer.participation.items():
            row = _row(self.clients, client)
            row[_DRAWN] += 1
            row[_USED] += outcome == "finished"
        for share in trainer.gather(self._round):
            for (client, column), count in share.items():
                _row(self.clients, client)[column] += count
        self._round.clear()
        part = (trainer.round_index - 1) * PARTS // trainer.max_rounds
        for quality in trainer.callbacks:
            if isinstance(quality, PseudoLabelQuality) and quality.table is not None:
                self.tables[part] = self.tables.get(part, 0) + quality.table
                self.wrong = quality.wrong

    # The page.

    def on_train_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the page before the first round."""
        self._write(trainer, "running")

    def on_pictures(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, is_last: bool
    ) -> None:
        """Write the page after a round, unless that would take too much of the time."""
        if time.perf_counter() >= self._next_write:
            self._write(trainer, "running")

    def on_fit_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the page of the whole run, or of one that was stopped."""
        self._write(trainer, "stopped" if trainer.interrupted else "ended")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the page of a run that failed."""
        if trainer.training:
            self._write(trainer, f"{type(exception).__name__}: {exception}")

    def _write(self, trainer: TrainerView, state: str) -> None:
        """Write the page of a state: ``running``, ``ended``, ``stopped``, or the error that ended
        the run.
        """
        if trainer.fast_dev_run or not (trainer.is_global_zero and trainer.log_dir):
            return
        started, path = time.perf_counter(), Path(trainer.log_dir, FILE_NAME)
        data, config = trainer.datamodule, path.with_name("config.yaml")
        try:
            page.write(
                path,
                "run.html",
                state == "running",
                state=state,
                trainer=trainer,
                report=self,
                data=data,
                history=trainer.run.folder.history,
                written=time.strftime("%Y-%m-%d %H:%M:%S"),
                accuracy_error=accuracy_error,
                chart=page.chart,
                command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                config=config.read_text(encoding="utf-8") if config.is_file() else "",
            )
        except Exception as error:  # such as a full disk: a picture of a run must not end it
            _log.warning("%s cannot be written: %s", path, error)
        ended = time.perf_counter()
        self._next_write = ended + max(_PAUSE, _COST * (ended - started))


class _Listener(logging.Handler):
    """Keeps the warnings of a logger."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _row(counts: Counts, client: int) -> Tensor:
    """The counts of a client, zeros if it has none."""
    return counts.setdefault(client, torch.zeros(5, dtype=torch.int64))
