"""Trains the labels alone after a run: the result then says whether the clients' images helped."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.checkpoint import FederatedCheckpoint
from lightning_fedssl.callbacks.simple_classifiers import (
    accuracy_error,
    simple_answers,
)
from lightning_fedssl.data.datasets import plural
from lightning_fedssl.functional.by_name import mapped

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import Run

_log = logging.getLogger(__name__)


CHOSEN = "chosen.ckpt"
"""The checkpoint of a run that ``export`` takes if none is named."""


class LabelsAlone(FederatedCallback):
    """Trains the server's labels alone after the last round, and compares both models on the test
    images.

    The bound is :class:`~lightning_fedssl.algorithms.Supervised` with the network, the optimizer of
    the server, the schedule and the seed of the run, and as many steps as the server has made in
    it. Its test accuracy is logged as ``bound/accuracy`` beside ``test/accuracy``; of another task
    than classification its first metric, and no more is compared or chosen. With few labels
    a simple classifier is often better than any network: those of
    :func:`~lightning_fedssl.callbacks.simple_classifiers.simple_answers` are logged as
    ``simple/logistic_regression`` and ``simple/extra_trees``, and ``simple/majority`` is the share
    of the largest class. The last lines of the run compare all; ``export`` writes networks, not
    classifiers of scikit-learn.

    ``checkpoints/chosen.ckpt`` is what ``export`` takes if no checkpoint is named: the last model
    with the clients' samples if :func:`estimate_gain` is above 0, else that of the labels alone;
    ``chosen/accuracy`` is its test accuracy.

    It costs the server's share of the run once more. With labels at the clients (of which it
    warns), in a run of ``Supervised``, or one that was interrupted, it does nothing.

    Args:
        expected_gain: What the clients' samples are expected to add to the accuracy, before any
            validation. The default is a loss, as on real tables and series.
    """

    saved = ("steps",)

    def __init__(self, expected_gain: float = -0.02) -> None:
        self.expected_gain = expected_gain
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.steps = 0
        self.chosen = ""
        self.lines: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Warn of labels at the clients: a server without labels has no bound."""
        if stage == "fit" and trainer.datamodule.label_location != "server":
            _log.warning("LabelsAlone does nothing: data.label_location is clients")

    def on_server_batch_end(self, trainer: Run, algorithm: FederatedAlgorithm, step: int) -> None:
        """Count the steps of the server."""
        self.steps += 1

    def on_train_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Train the bound before the checkpoints and the result of the run are written."""
        if (
            trainer.interrupted
            or trainer.fast_dev_run
            or not (algorithm.trains_clients and self.steps)
        ):
            return
        with TemporaryDirectory() as folder:
            # Every rank trains the same bound: preparing a run waits for all ranks of the process
            # group.
            bound = trainer.gather(trainer.train_labels_alone(self.steps, folder))[0]
            task = trainer.datamodule.task
            name = f"test/{task.monitor}"
            if name not in bound:
                _log.warning(
                    "the labels alone were not trained to the end: there is no bound/%s",
                    task.monitor,
                )
                return
            trainer.log_metrics({f"bound/{task.monitor}": bound[name]})
            if "one class" not in task.gives:
                found = float(trainer.callback_metrics[name])
                noun = trainer.datamodule.spec.noun
                self.lines.append(
                    f"{name}: labels alone {bound[name]:.4f}, with the clients' {noun}s {found:.4f}"
                )
                return
            self._choose(trainer, algorithm, bound, Path(folder, "checkpoints/last.ckpt"))
        self._compare(trainer)

    def on_fit_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Print the comparison, the last lines of the run."""
        if self.lines:
            trainer.print("\n".join(self.lines))

    def _choose(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        bound: Metrics,
        labels_alone: Path,
    ) -> None:
        """Write the checkpoint that ``export`` takes, and say which model it has and why."""
        count = len(trainer.datamodule.validation_labels)
        chosen = mapped(float, trainer.callback_metrics)
        ours, alone = chosen.get("val/accuracy", 0.0), bound.get("val/accuracy", 0.0)
        gain, error = estimate_gain(ours, alone, count, self.expected_gain)
        path = FederatedCheckpoint.folder(trainer) / CHOSEN
        trainer.save_checkpoint(path, weights_only=True)
        self.chosen = type(algorithm).__name__
        model = "the last model"
        if gain <= 0:
            chosen = bound
            self.chosen = "Supervised"
            model = "the labels alone"
            if trainer.is_global_zero:
                shutil.copy(labels_alone, path)
        trainer.log_metrics({"chosen/accuracy": chosen["test/accuracy"]})
        self.lines.append(
            f"export takes {model}: estimated gain by the clients {100 * gain:+.1f} points "
            f"(standard error {100 * error:.1f}), of {100 * self.expected_gain:+.1f} expected and "
            f"{plural(count, 'validation sample')}"
        )

    def _compare(self, trainer: Run) -> None:
        """Fit the simple classifiers, and say how all compare on the test samples."""
        data = trainer.datamodule
        measured = trainer.callback_metrics
        answers = trainer.gather(simple_answers(data) if trainer.is_global_zero else [])[0]
        most = float(data.test_labels.bincount().max() / len(data.test_labels))
        trainer.log_metrics({"simple/majority": most})
        names = []
        for answer in answers:
            trainer.log_metrics({f"simple/{answer.name.replace(' ', '_')}": answer.accuracy})
            names.append(f"{answer.name} {100 * answer.accuracy:.1f} %")
        alone, accuracy = float(measured["bound/accuracy"]), float(measured["test/accuracy"])
        noun, count = data.spec.noun, len(data.test_labels)
        best, name = alone, "the labels alone"
        if answers:
            first = answers[0]  # chosen by the labels: a choice by test samples would flatter it
            best, name = max((alone, name), (first.accuracy, first.name))
            self.lines += [
                f"simple answers: {', '.join(names)}; always the largest class {100 * most:.1f} %",
                f"best of them by cross-validation over the {len(data.split.server_labeled)} "
                f"labels ({100 * first.estimate:.0f} %, standard error "
                f"{plural(round(100 * first.error), 'point')}): {first.name} "
                f"{100 * first.accuracy:.1f} % (export does not write it: fit scikit-learn's "
                "yourself, to the features of data.backbone if there is one); with the clients' "
                f"{noun}s {100 * accuracy:.1f} %",
            ]
        advice = next_step(name, best, accuracy, count, export_command(trainer))
        if data.spec.pixels and data.backbone is None:
            advice += "; for photographs try presets/pretrained_images.yaml first"
        self.lines += [verdict(alone, accuracy, count, noun), f"next: {advice}"]


def export_command(trainer: Run) -> str:
    """The command that exports the model of a run, of the last round if none was the best."""
    has_best = Path(str(trainer.log_dir), "checkpoints", "best.ckpt").exists()
    last = "" if has_best else " --ckpt_path last"
    return f"lightning-fedssl export --default_root_dir {trainer.default_root_dir}{last}"


def difference_error(one: float, other: float, samples: int) -> float:
    """The standard error, in samples, of the difference of two accuracies on the same samples: at
    most, since both models find the same samples hard.

    Args:
        one: An accuracy, from 0 to 1.
        other: The other.
        samples: How many they are measured on.
    """
    return samples * math.hypot(accuracy_error(one, samples), accuracy_error(other, samples))


def next_step(name: str, best: float, accuracy: float, samples: int, command: str) -> str:
    """What to do after a run.

    Args:
        name: What is best without the clients' samples.
        best: Its test accuracy, from 0 to 1.
        accuracy: That with them.
        samples: Test samples.
        command: What exports the model.
    """
    gain = samples * (accuracy - best)
    error = difference_error(best, accuracy, samples)
    if abs(gain) < 2 * error:
        return (
            f"the difference to {name} is below two standard errors: repeat with "
            "--seed_everything 1, 2, ..., or test on more samples where that changes nothing"
        )
    if gain > 0:
        return f"{command} writes the model"
    return f"use {name} or label more: the clients' samples do not help here"


def verdict(bound: float, accuracy: float, images: int, noun: str) -> str:
    """The comparison in one line.

    Args:
        bound: Test accuracy of the labels alone, from 0 to 1.
        accuracy: Test accuracy with the clients' samples.
        images: Test samples.
        noun: What a sample is called.
    """
    gain = abs(accuracy - bound)
    found = (
        f"{'better' if accuracy > bound else 'worse'} by {100 * gain:.1f} points, "
        f"{images * gain:.0f} of"
    )
    return (
        f"labels alone {100 * bound:.1f} %, with the clients' {noun}s {100 * accuracy:.1f} %: "
        f"{found if gain else 'no difference on'} {images} test {noun}s "
        f"(standard error {plural(round(difference_error(bound, accuracy, images)), noun)})"
    )


EXPECTED_ERROR = 0.03
"""The deviation of the gain by the clients' samples between real tasks."""


def estimate_gain(
    accuracy: float, bound: float, count: int, expected: float
) -> tuple[float, float]:
    """The gain of the clients' samples: the expected one, corrected by what validation shows.

    Both are weighted by their precision, so a few validation samples change little.

    Args:
        accuracy: Validation accuracy with the clients' samples, from 0 to 1.
        bound: That of the labels alone.
        count: Validation samples; 0 for none.
        expected: The gain before any validation.

    Returns:
        The estimate and its standard error.
    """
    if not count:
        return expected, EXPECTED_ERROR
    measured = (count / difference_error(accuracy, bound, count)) ** 2
    before = 1 / EXPECTED_ERROR**2
    gain = (measured * (accuracy - bound) + before * expected) / (measured + before)
    return gain, 1 / math.sqrt(measured + before)
