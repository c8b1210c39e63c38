"""Shows the progress of a run, and reports its data and its result."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.answer import accuracy_error
from lightning_fedssl.callbacks.checkpoint import FederatedCheckpoint
from lightning_fedssl.callbacks.labels_alone import LabelsAlone, export_command
from lightning_fedssl.data.datasets import plural
from lightning_fedssl.functional.dictionaries import starting_with

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import ClientUpdate

LINE = 80
"""Columns of a line about a round."""

SILENT_LINES = 10
"""Lines about rounds of a run without validation."""

FEWEST_SAMPLES = 50
"""Samples below which an accuracy is shown as a count: one of them is worth several points."""

_COLUMNS = {
    "server/loss": "server loss {:.3f}",
    "client/loss": "client loss {:.3f}",
    "client/mask_rate": "mask rate {:.0%}",
    "pseudo_label/confident_accuracy": "pseudo-labels {:.1%}",
}

_OWN = (
    "clients' own models: mean {client_test/personal_accuracy_mean:.2%}, "
    "worst tenth {client_test/personal_accuracy_worst_tenth:.2%}"
)
"""Of clients that keep weights for themselves."""

_MISSING = {"client/dropped": "dropped out", "client/refused": "rejected"}


LAST_ROUNDS = 5
"""Rounds from whose seconds the time left is taken."""


def repaints() -> bool:
    """Whether a bar can be painted anew: in a terminal, not in the cell of a notebook, where each
    repaint is stored as a line.
    """
    return sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ


def fitting(parts: Sequence[str], room: int) -> str:
    """The parts that fit into a line, the first ones if not all do.

    Args:
        parts: Texts, the most important first.
        room: Columns.
    """
    line = ""
    for part in filter(None, parts):
        longer = f"{line}  {part}" if line else part
        line = longer if len(longer) <= room else line
    return line


def round_parts(metrics: Metrics, samples: int) -> list[str]:
    """The most important scalars of a round as texts, the most important first.

    Args:
        metrics: The scalars.
        samples: Validation samples.
    """
    parts, accuracy = participation(metrics), metrics.get("val/accuracy")
    if accuracy is None:
        parts += own_parts(metrics, "val")
    elif 0 < samples < FEWEST_SAMPLES:
        parts.append(f"val {accuracy * samples:.0f} of {samples}")
    else:
        parts.append(f"val {accuracy:.1%}")
    return parts + [text.format(metrics[key]) for key, text in _COLUMNS.items() if key in metrics]


def participation(metrics: Metrics) -> list[str]:
    """How many of the selected clients took part, and why others did not; empty in a run in which
    clients cannot be missing.
    """
    if "client/selected" not in metrics:
        return []
    count = f"{metrics['client/finished']:.0f} of {metrics['client/selected']:.0f}"
    missing = [f"{metrics[key]:.0f} {why}" for key, why in _MISSING.items() if metrics.get(key)]
    return [f"{count} clients took part", *missing]


def result_parts(
    metrics: Metrics, stage: Literal["val", "test"], samples: int = 0, noun: str = "sample"
) -> list[str]:
    """Accuracy and loss of an evaluation as text; of one without an accuracy, what it logs.

    Args:
        metrics: The scalars.
        stage: Which evaluation.
        samples: Evaluated samples, for the standard error; 0 if it is not known.
        noun: What a sample is called.
    """
    if f"{stage}/accuracy" not in metrics:
        return own_parts(metrics, stage)
    title = "test" if stage == "test" else "validation"
    accuracy = metrics[f"{stage}/accuracy"]
    parts = [f"{title} accuracy {accuracy:.2%}"]
    if samples:
        error = samples * accuracy_error(accuracy, samples)
        parts[0] += (
            f" ({samples * accuracy:.0f} of {plural(samples, noun)}, standard error "
            f"{plural(round(error), noun)})"
        )
    if f"{stage}/loss" in metrics:
        parts.append(f"{title} loss {metrics[f'{stage}/loss']:.4f}")
    return parts


def own_parts(metrics: Metrics, stage: Literal["val", "test"]) -> list[str]:
    """What an evaluation logs under names of its own, such as ``val_mse``."""
    return [f"{name} {value:.4g}" for name, value in starting_with(stage, metrics).items()]


class RoundProgress(FederatedCallback):
    """Shows how far a run is, and prints its result.

    In a terminal it is a bar with the clients of the round that are done, the last validation and
    the time left, elsewhere a line of at most :data:`LINE` columns a round. Part of every run;
    ``trainer.enable_progress_bar`` turns off the progress, not the result.

    Args:
        of: What is trained in addition to the run's model, such as ``labels alone``: of it only the
            progress is shown.
    """

    def __init__(self, of: str = "") -> None:
        self.of = of
        self._bar: tqdm[Any] | None = None
        self._parts: list[str] = []
        self._seconds: deque[float] = deque(maxlen=LAST_ROUNDS)

    def on_fit_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Report the data, ``data.txt``, and the partition: its statistics, ``partition.json``."""
        from lightning_fedssl.data.sources.reading import FILE_NAME

        data = trainer.datamodule
        if self.of:
            return
        if trainer.enable_progress_bar:
            read = [data.reading.summary()] if data.reading.facts else []  # not of users' loaders
            trainer.print("\n".join([*read, data.statistics.summary()]))
        if trainer.is_global_zero and trainer.log_dir:
            data.split.save(Path(trainer.log_dir) / "partition.json")
            lines = [*data.reading.lines(), data.statistics.summary(), ""]
            Path(trainer.log_dir, FILE_NAME).write_text("\n".join(lines), encoding="utf-8")

    def on_train_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Open the bar, which measures the time; without a terminal it writes nothing itself."""
        if not (trainer.enable_progress_bar and trainer.is_global_zero):
            return
        terminal = repaints()
        if self.of and not terminal:
            trainer.print(f"training the {self.of}: {plural(trainer.max_rounds, 'round')}")
        self._parts = []
        self._left = "?"
        self._seconds.clear()
        self._bar = tqdm(
            total=trainer.max_rounds, initial=trainer.round_index, miniters=0,
            mininterval=0.1 if terminal else math.inf,
            file=sys.stdout if terminal else io.StringIO(),
            bar_format=f"{'|{bar}| ' if terminal else ''}{{desc}}",
            dynamic_ncols=terminal, leave=not self.of,
        )  # fmt: skip

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """No client of the round is done."""
        self._clients = 0

    def on_server_batch_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, step: int
    ) -> None:
        """Show the server's step."""
        self._move(trainer, f"server step {step + 1}")

    def on_client_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Show the clients that are done; other ranks are as far as this one."""
        self._clients = min(self._clients + trainer.world_size, len(trainer.cohort))
        self._move(trainer, f"client {self._clients}/{len(trainer.cohort)}")

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Show the round's scalars."""
        self._clients = len(trainer.cohort)
        self._seconds.append(metrics["time/round_s"])
        # The slowest round but one: one of them may have waited for something else.
        left = sorted(self._seconds)[-2:][0] * (trainer.max_rounds - trainer.round_index)
        # As more labels become confident, clients take more steps, and rounds become longer.
        grows = self._seconds[-1] > 1.2 * min(self._seconds) or metrics.get("client/mask_rate") == 0
        prefix = "at least " if left >= 1 and grows else ""
        self._left = prefix + tqdm.format_interval(left)
        self._parts = round_parts(metrics, len(trainer.datamodule.validation_labels))
        self._move(trainer)
        # Without an evaluation most rounds say nothing new.
        every = 1 if starting_with("val", metrics) else max(1, trainer.max_rounds // SILENT_LINES)
        due = trainer.round_index % every == 0 or trainer.round_index == trainer.max_rounds
        if self._bar is not None and due and not (repaints() or self.of):
            trainer.print(str(self._bar))

    def on_evaluation_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Print the result on the test images, or on the validation images after the command
        ``validate``.
        """
        is_test = bool(starting_with("test", metrics))
        if not is_test and trainer.training:
            return
        self._close()
        data = trainer.datamodule
        samples = 0
        if data.class_names and not trainer.fast_dev_run:
            samples = len(data.test_labels if is_test else data.validation_labels)
        parts = result_parts(metrics, "test" if is_test else "val", samples, data.spec.noun)
        if parts and not self.of:
            trainer.print(f"after round {trainer.round_index}: {', '.join(parts)}")
            if "client_test/personal_accuracy_mean" in metrics:
                trainer.print(_OWN.format_map(metrics))

    def on_train_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Print the run folder, and what to do with it."""
        self._close()
        if not trainer.log_dir:
            return
        trainer.print(f"run folder: {trainer.log_dir}")
        answered = any(
            isinstance(callback, LabelsAlone) and callback.answer for callback in trainer.callbacks
        )
        if not (trainer.interrupted or answered):
            folder = FederatedCheckpoint.folder(trainer)
            best = folder / "best.ckpt"
            path = best if best.exists() else folder / "last.ckpt"
            trainer.print(f"next: {export_command(path)}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the bar, also after an error."""
        self._close()

    def _move(self, trainer: TrainerView, now: str = "") -> None:
        """Move the bar to the present client; beside it are what happens now and the last round."""
        if self._bar is None:
            return
        done = self._clients / max(1, len(trainer.cohort))
        self._bar.n = max(trainer.round_index - 1 + done, self._bar.initial)
        left = f" {self._left} left"
        columns = shutil.get_terminal_size().columns - LINE // 2 if repaints() else LINE - 1
        room = columns - len(left)
        begin = f"round {trainer.round_index}/{trainer.max_rounds}"
        text = fitting([self.of, begin, now, *self._parts], room)
        self._bar.set_description_str(text.ljust(room) + left, refresh=False)
        self._bar.update(0)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
