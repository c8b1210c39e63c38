"""The TensorBoard dashboard: related charts in groups, the run as text, and a row in the table of
runs.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import boards_of, has_pictures, show_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import Run

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Overview": {
        "accuracy": ["Multiline", ["^val/accuracy$", "^test/accuracy$"]],
        "loss": ["Multiline", ["^server/loss$", "^client/loss$", "^val/loss$"]],
        "pseudo-labels": [
            "Multiline",
            ["^client/mask_rate$", "^pseudo_label/(confident_)?accuracy$"],
        ],
        "share of the largest class": [
            "Multiline",
            [r"^(pseudo_label|group|val|test)/largest_class_share$"],
        ],
        "bytes": ["Multiline", ["^communication/(up|down)load_bytes$"]],
    },
    "Classes": {
        "recall": ["Multiline", [r"^(val|test)/recall.*"]],
        "mask rate": ["Multiline", [r"^client/mask_rate/class_\d+$"]],
        "pseudo-label accuracy": ["Multiline", [r"^pseudo_label/accuracy/class_\d+$"]],
        "accuracy of confident pseudo-labels": [
            "Multiline",
            [r"^pseudo_label/confident_accuracy/class_\d+$"],
        ],
    },
    "Clients": {
        "clients that took part": [
            "Multiline",
            ["^client/(selected|trained|finished|dropped|refused)$"],
        ],
        "accuracy over the clients": ["Multiline", [r"^client_(val|test|accuracy).*"]],
        "local steps": ["Multiline", [r"^client/steps_.*"]],
    },
}
"""The charts of the tab *Custom scalars*, with regular expressions for their scalars.

A run has the charts of which it has logged a scalar.
"""


class Dashboard(FederatedCallback):
    """Writes the layout, texts and hyper-parameters of a run for TensorBoard.

    It does not affect training.

    The tab *Custom scalars* gets the charts of :data:`LAYOUT` that have a scalar, as soon as they
    have one. The tab *Text* gets the configuration, the partition and the paper to cite. The tab
    *HParams* gets one row per run: method, seed, the settings of trainer, data, partition, network,
    optimizers and schedule by their keys, and the final test accuracy. The runs of a folder form a
    table. Weights & Biases and MLflow get the texts, too; they have tables of runs of their own.
    Part of every run.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._scalars: set[str] = set()

    def on_fit_start(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the texts before the first round."""
        for title, text in (
            describe_run(trainer, algorithm).items() if has_pictures(trainer) else ()
        ):
            show_text(trainer, title, text)

    def on_round_end(self, trainer: Run, algorithm: FederatedAlgorithm, metrics: Metrics) -> None:
        """Write the layout again when a round has the first scalar of a chart."""
        self._write_layout(trainer, metrics)

    def on_fit_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the row of *HParams*.

        An interrupted run gets no row, because it has no test accuracy.
        """
        accuracy = trainer.callback_metrics.get("test/accuracy")
        if accuracy is None:
            return
        self._write_layout(trainer, trainer.callback_metrics)
        from torch.utils.tensorboard.summary import hparams

        row = {"method": type(algorithm).__name__, "seed": trainer.seed, **trainer.table_row}
        for board in boards_of(trainer):
            for summary in hparams(row, {"test/accuracy": float(accuracy)}):
                board.experiment.file_writer.add_summary(summary)

    def _write_layout(self, trainer: Run, scalars: Iterable[str]) -> None:
        """TensorBoard shows the last layout of a run."""
        before = charts_of(self._scalars)
        self._scalars = self._scalars | set(scalars)
        if (layout := charts_of(self._scalars)) != before:
            from torch.utils.tensorboard.summary import custom_scalars

            for board in boards_of(trainer):
                board.experiment.file_writer.add_summary(
                    custom_scalars(layout), trainer.round_index
                )


def charts_of(scalars: Collection[str]) -> dict[str, dict[str, list[Any]]]:
    """The groups and charts of :data:`LAYOUT` that show at least one of these scalars.

    Args:
        scalars: Their names.
    """

    def shows_any(patterns: Iterable[str]) -> bool:
        return any(re.match(pattern, scalar) for pattern in patterns for scalar in scalars)

    shown = {
        group: {title: chart for title, chart in charts.items() if shows_any(chart[1])}
        for group, charts in LAYOUT.items()
    }
    return {group: charts for group, charts in shown.items() if charts}


def describe_run(trainer: Run, algorithm: FederatedAlgorithm) -> dict[str, str]:
    """Texts about a run in Markdown, by their titles.

    Args:
        trainer: The trainer of the run.
        algorithm: The run's method.
    """
    texts = {"partition": _as_code(trainer.datamodule.statistics.summary())}
    paper = (inspect.getdoc(inspect.getmodule(type(algorithm))) or "").strip()
    if paper:
        texts["method and paper"] = "\n\n".join(paper.split("\n\n")[:2])
    config = Path(trainer.log_dir or "", "config.yaml")
    if config.is_file():
        texts["configuration"] = _as_code(config.read_text(encoding="utf-8"))
    return texts


def _as_code(text: str) -> str:
    """The text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())
