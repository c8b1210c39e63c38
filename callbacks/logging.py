"""Prints the progress of a run, and reports its partition."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.pytorch.trainer.states import TrainerFn

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import has_pictures, show_figure
from lightning_fedssl.callbacks.metric_matrices import evaluated_on

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics import Metrics
    from lightning_fedssl.run import Run

_COLUMNS = {
    "server/loss": ("server loss", "{:.3f}"),
    "client/loss": ("client loss", "{:.3f}"),
    "client/images": ("{noun}s of clients", "{:,.0f}"),
    "client/mask_rate": ("mask rate", "{:.0%}"),
    "pseudo_label/confident_accuracy": ("pseudo-label accuracy", "{:.1%}"),
    "val/accuracy": ("validation accuracy", "{:.1%}"),
    "time/round_s": ("time", "{:.1f} s"),
}


_MISSING = {"client/dropped": "dropped out", "client/refused": "rejected"}


def round_line(metrics: Metrics, noun: str = "image") -> str:
    """The most important scalars of a round as one line.

    Args:
        metrics: The scalars.
        noun: What a sample is called.
    """
    columns = {
        name: (title.format(noun=noun), form)
        for name, (title, form) in _COLUMNS.items()
        if name in metrics
    }
    scalars = [f"{title} {form.format(metrics[name])}" for name, (title, form) in columns.items()]
    return "  ".join([*participation_line(metrics), *scalars, *own_parts(metrics, "val")])


def participation_line(metrics: Metrics) -> list[str]:
    """How many of the selected clients took part.

    Nothing in a run in which clients cannot be missing.
    """
    if "client/selected" not in metrics:
        return []
    counts = {phrase: metrics.get(key, 0.0) for key, phrase in _MISSING.items()}
    counts["without work"] = (
        metrics["client/selected"] - metrics["client/finished"] - sum(counts.values())
    )
    missing = ", ".join(f"{count:.0f} {phrase}" for phrase, count in counts.items() if count > 0)
    took_part = (
        f"{metrics['client/finished']:.0f} of {metrics['client/selected']:.0f} clients took part"
    )
    return [f"{took_part} ({missing})" if missing else took_part]


def result_parts(metrics: Metrics, stage: Literal["val", "test"]) -> list[str]:
    """Accuracy and loss of an evaluation as text; of one without an accuracy, what it logs."""
    if f"{stage}/accuracy" not in metrics:
        return own_parts(metrics, stage)
    title = "test" if stage == "test" else "validation"
    forms = {"accuracy": "{:.2%}", "loss": "{:.4f}"}
    known = [name for name in forms if f"{stage}/{name}" in metrics]
    return [f"{title} {name} {forms[name].format(metrics[f'{stage}/{name}'])}" for name in known]


def own_parts(metrics: Metrics, stage: Literal["val", "test"]) -> list[str]:
    """What an evaluation logs under names of its own, such as ``val_mse``.

    Nothing beside an accuracy.
    """
    if f"{stage}/accuracy" in metrics:
        return []
    return [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith(stage)]


class RoundProgress(FederatedCallback):
    """Prints one line per round, and the result at the end."""

    def on_fit_start(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Report the data, ``data.txt``, and the partition: its statistics, ``partition.json``,
        and a picture for the logger.
        """
        from lightning_fedssl.data.partition.statistics import heatmap
        from lightning_fedssl.data.sources.reading import FILE_NAME

        data = trainer.datamodule
        if data.reading.facts:  # loaders of the user's own are not looked at
            _print(trainer, data.reading.summary())
        _print(trainer, data.statistics.summary())
        if trainer.is_global_zero and trainer.log_dir:
            data.split.save(Path(trainer.log_dir) / "partition.json")
            lines = [*data.reading.lines(), data.statistics.summary(), ""]
            Path(trainer.log_dir, FILE_NAME).write_text("\n".join(lines), encoding="utf-8")
        if has_pictures(trainer) and trainer.datamodule.class_names:
            show_figure(trainer, "partition", heatmap(trainer.datamodule.statistics))

    def on_round_end(self, trainer: Run, algorithm: FederatedAlgorithm, metrics: Metrics) -> None:
        """Print the round's line."""
        line = round_line(metrics, trainer.datamodule.spec.noun)
        _print(trainer, f"round {trainer.round_index}/{trainer.max_rounds}  {line}")

    def on_evaluation_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Print the result on the test images, or on the validation images after the command
        ``validate``.
        """
        stage = evaluated_on(metrics)
        parts = result_parts(metrics, stage)
        if parts and (stage == "test" or trainer.state.fn != TrainerFn.FITTING):
            _print(trainer, f"after round {trainer.round_index}: {', '.join(parts)}")

    def on_train_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Print the run folder."""
        if trainer.log_dir:
            _print(trainer, f"run folder: {trainer.log_dir}")


def _print(trainer: Run, line: str) -> None:
    if trainer.enable_progress_bar and trainer.is_global_zero:
        print(line, flush=True)
