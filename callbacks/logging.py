"""Prints the progress of a run, and reports its partition."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import has_pictures, show_picture
from lightning_fedssl.callbacks.metric_matrices import evaluated_on

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.trainer import FederatedTrainer

_COLUMNS = {
    "server/loss": ("server loss", "{:.3f}"),
    "client/loss": ("client loss", "{:.3f}"),
    "client/images": ("{noun}s of clients", "{:,.0f}"),
    "client/mask_rate": ("mask rate", "{:.0%}"),
    "pseudo_label/confident_accuracy": ("pseudo-label accuracy", "{:.1%}"),
    "val/accuracy": ("validation accuracy", "{:.1%}"),
    "time/round_s": ("time", "{:.1f} s"),
}


_MISSING = {"client/dropped": "dropped out", "client/late": "late", "client/refused": "rejected"}


def round_line(metrics: dict[str, float], noun: str = "image") -> str:
    """The most important scalars of a round as one line.

    Args:
        metrics: The scalars.
        noun: What a sample is called.
    """
    columns = {name: (title.format(noun=noun), form) for name, (title, form) in _COLUMNS.items() if name in metrics}
    scalars = [f"{title} {form.format(metrics[name])}" for name, (title, form) in columns.items()]
    return "  ".join([*participation_line(metrics), *scalars])


def participation_line(metrics: dict[str, float]) -> list[str]:
    """How many of the selected clients took part; nothing in a run in which clients cannot be missing."""
    if "client/selected" not in metrics:
        return []
    counts = {phrase: metrics.get(key, 0.0) for key, phrase in _MISSING.items()}
    counts["without work"] = metrics["client/selected"] - metrics["client/finished"] - sum(counts.values())
    missing = ", ".join(f"{count:.0f} {phrase}" for phrase, count in counts.items() if count > 0)
    took_part = f"{metrics['client/finished']:.0f} of {metrics['client/selected']:.0f} clients took part"
    return [f"{took_part} ({missing})" if missing else took_part]


def bar_line(metrics: dict[str, float], noun: str = "image") -> str:
    """Clients' samples, loss and validation accuracy, short enough to fit next to a progress bar on a narrow terminal.

    Args:
        metrics: The scalars of a round.
        noun: What a sample is called.
    """
    loss = metrics.get("client/loss", metrics.get("server/loss"))
    accuracy = metrics.get("val/accuracy")
    parts = []
    if "client/selected" in metrics:
        parts.append(f"{metrics['client/finished']:.0f}/{metrics['client/selected']:.0f} clients")
    if "client/images" in metrics:
        parts.append(f"{metrics['client/images']:,.0f} {noun}s")
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if accuracy is not None:
        parts.append(f"accuracy {accuracy:.1%}")
    return "  ".join(parts)


def result_parts(metrics: dict[str, float], stage: Literal["val", "test"]) -> list[str]:
    """Accuracy and loss of an evaluation as text, as far as the method has them."""
    title = "test" if stage == "test" else "validation"
    forms = {"accuracy": "{:.2%}", "loss": "{:.4f}"}
    known = [name for name in forms if f"{stage}/{name}" in metrics]
    return [f"{title} {name} {forms[name].format(metrics[f'{stage}/{name}'])}" for name in known]


class RoundProgress(FederatedCallback):
    """Shows a progress bar over rounds on a terminal, one line per round elsewhere, and the result at the end."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True, highlight=False, markup=False)
        self._progress: Progress | None = None

    def on_train_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Start the progress bar."""
        if not (trainer.enable_progress_bar and trainer.is_global_zero and self._console.is_terminal):
            return
        columns = (
            TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=12), TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
        )  # fmt: skip
        self._progress = Progress(*columns, console=self._console)
        self._progress.start()
        self._progress.add_task("rounds", total=trainer.max_rounds, completed=trainer.round_index, line="")

    def on_round_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        """Advance the progress bar, or print the round's line."""
        noun = trainer.datamodule.spec.noun
        line = round_line(metrics, noun)
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=trainer.round_index, line=bar_line(metrics, noun))
        else:
            self._print(trainer, f"round {trainer.round_index}/{trainer.max_rounds}  {line}")

    def on_evaluation_end(
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, metrics: dict[str, float]
    ) -> None:
        """Print the result on the test images, or on the validation images after the command ``validate``."""
        stage = evaluated_on(metrics)
        if stage == "val" and trainer.state.fn == TrainerFn.FITTING:
            return
        if parts := result_parts(metrics, stage):
            self._print(trainer, f"after round {trainer.round_index}: {', '.join(parts)}")

    def on_train_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Close the progress bar and print the run folder."""
        self._close()
        if trainer.log_dir:
            self._print(trainer, f"run folder: {trainer.log_dir}")

    def on_exception(  # type: ignore[override]
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, exception: BaseException
    ) -> None:
        """Close the progress bar before the error message is printed."""
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, trainer: FederatedTrainer, line: str) -> None:
        if trainer.enable_progress_bar and trainer.is_global_zero:
            self._console.print(line)


class PartitionReport(FederatedCallback):
    """Saves the partition as ``partition.json``, prints its statistics, and draws it as a heat map for the logger."""

    def on_fit_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Report the partition before the first round."""
        from lightning_fedssl.data.partition.statistics import heatmap

        if not trainer.is_global_zero:
            return
        statistics = trainer.datamodule.statistics
        if trainer.enable_progress_bar:
            Console(soft_wrap=True, highlight=False, markup=False).print(statistics.summary())
        if trainer.log_dir:
            trainer.datamodule.split.save(Path(trainer.log_dir) / "partition.json")
        if has_pictures(trainer):
            show_picture(trainer, "partition", heatmap(statistics))
