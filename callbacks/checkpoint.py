"""Writes the checkpoints of the last and of the best round, and the trained model."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.storage.files import write_bytes

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView


_log = logging.getLogger(__name__)

DECLINE = 0.05
"""The distance of the last accuracy from the best one, in shares of images, from which a run names
it at its end."""

FEWEST = 20
"""Samples below which a share of them says nothing about a run.

A model that labels two classes equally often, the fewest that it can, gives at least 19 of 20
labels to one of them with a probability of 4e-5. With a single label the share is always 1.
"""


class FederatedCheckpoint(FederatedCallback):
    """Writes ``checkpoints/last.ckpt`` and ``checkpoints/best.ckpt`` in the run folder, each as one
    atomic operation.

    At the end of a run it also writes the last model to the same folder, for programs that do not
    use this package: ``model.safetensors`` and ``model.json``. If the last accuracy is at least 5
    points below the best one, it says so: self-training can learn its own errors. ``best`` lacks
    the clients' states, such as the momentum of their optimizers, which are often larger than the
    model, and with them the server's momentum: only resuming a run needs them. ``last`` has them in
    ``checkpoints/last.states``, a file for each client, if they are larger than 8 MiB together.

    Args:
        monitor: The scalar that determines the best round; the task's first metric if left out,
            such as ``val/accuracy``. A round without this scalar cannot be the best.
        mode: Whether a larger (``max``) or smaller (``min``) value is better; as the task has it
            if ``monitor`` is left out.
        every_n_rounds: Interval of writing ``last``, which is also written when the run ends or is
            stopped.

    Attributes:
        best_value: The best value so far; None before the first.
        best_round: Its round.
        best_model_path: Its checkpoint, if this command has written one, as Lightning names it.
    """

    saved = ("best_value", "best_round")

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        every_n_rounds: int = 1,
    ) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        self.strict = monitor is not None
        self.monitor = monitor or "val/accuracy"
        self.mode: Literal["max", "min"] = mode
        self.every_n_rounds = every_n_rounds
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.best_value: float | None = None
        self.best_round = 0
        self.best_model_path = ""
        self._last_value: float | None = None
        self._saved_round = 0
        self._warned = False

    def setup(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, stage: str
    ) -> None:
        """Take the task's own metric if none is given."""
        if not self.strict:
            task = trainer.datamodule.task
            self.monitor = f"val/{task.monitor}"
            self.mode = "max" if task.larger_is_better else "min"

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Write ``best`` if this round is the best so far, and ``last`` at its interval."""
        self._warn_if_unknown(trainer, metrics)
        if self.monitor in metrics:
            self._last_value = value = metrics[self.monitor]
            if self._is_better(value):
                self.best_value = value
                self.best_round = trainer.round_index
                self.best_model_path = str(self.folder(trainer) / "best.ckpt")
                trainer.save_checkpoint(self.best_model_path, weights_only=True)
        if trainer.round_index % self.every_n_rounds == 0:
            self._save_last(trainer)

    def on_train_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the model, and ``last`` if it has an earlier round, or outdated statistics of
        static batch norm.
        """
        if has_static_batch_norm(algorithm):
            self._save_last(trainer)
        self.save_missing(trainer)
        trainer.save_model(self.folder(trainer))
        self._name_a_decline(trainer)

    def save_missing(self, trainer: TrainerView) -> None:
        """Write ``last`` if it has an earlier round."""
        if self._saved_round != trainer.round_index:
            self._save_last(trainer)

    @property
    def state_key(self) -> str:
        """A key that depends on monitor and mode, so that callbacks with other values of these have
        separate states.
        """
        return str(self._generate_state_key(monitor=self.monitor, mode=self.mode))

    @staticmethod
    def folder(trainer: TrainerView) -> Path:
        """The folder of a run's checkpoints."""
        return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"

    def _save_last(self, trainer: TrainerView) -> None:
        folder = self.folder(trainer)
        is_first = not self._saved_round and trainer.is_global_zero and not trainer.fast_dev_run
        if is_first and trainer.ckpt_path is not None:
            # The best checkpoint of the run that is resumed, unless this run is better already. Not
            # before there is a last to write: the folder of a run that is killed before holds
            # nothing that looks like a run.
            best = trainer.ckpt_path.with_name("best.ckpt")
            if best.is_file() and not (folder / best.name).exists():
                write_bytes(folder / best.name, best.read_bytes())
        self._saved_round = trainer.round_index
        trainer.save_checkpoint(folder / "last.ckpt")

    def _warn_if_unknown(self, trainer: TrainerView, metrics: Metrics) -> None:
        evaluated = sorted(name for name in metrics if name.startswith("val"))
        is_expected = self.monitor in metrics or self._warned or not trainer.datamodule.class_names
        if evaluated and not is_expected:
            self._warned = True
            _log.warning(
                "no scalar %s, so no best.ckpt: give FederatedCheckpoint(monitor=...) one of %s",
                self.monitor, ", ".join(evaluated),
            )  # fmt: skip

    def _name_a_decline(self, trainer: TrainerView) -> None:
        best = self.best_value
        last = self._last_value
        is_accuracy = self.monitor.endswith("accuracy") and self.mode == "max"
        is_sure = len(trainer.datamodule.validation_labels) >= FEWEST
        if best is None or last is None or not (is_accuracy and is_sure and trainer.is_global_zero):
            return
        if best - last >= DECLINE:
            _log.info(
                "%s was %.1f %% in round %d and is %.1f %% now: best.ckpt has the model of round "
                "%d, and --ckpt_path best chooses it for test, export and predict. If the scalars "
                "named largest_class_share have risen, self-training has learned its own errors",
                self.monitor, 100 * best, self.best_round, 100 * last, self.best_round,
            )  # fmt: skip

    def _is_better(self, value: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        best = -math.inf if self.best_value is None else sign * self.best_value
        return math.isfinite(value) and sign * value > best
