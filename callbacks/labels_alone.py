"""Trains the labels alone after a run, and decides which model the run hands over."""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.answer import EXPECTED_LOSS, Answer, Candidate, Name, decide
from lightning_fedssl.callbacks.checkpoint import FederatedCheckpoint
from lightning_fedssl.callbacks.simple_classifiers import largest_class, trees
from lightning_fedssl.models.head import MOST_VALUES, folds, trains_head_alone
from lightning_fedssl.state import load_state
from lightning_fedssl.storage import checkpoint_file

if TYPE_CHECKING:
    from lightning_fedssl.data import FederatedDataModule
    from lightning_fedssl.run import Beside, TrainerView

_log = logging.getLogger(__name__)


class LabelsAlone(FederatedCallback):
    """Trains the server's labels alone after the last round, and decides which model the run hands
    over: ``checkpoints/chosen.ckpt``, which ``export`` and ``predict`` take if none is named.

    Candidates are the best *linear* answer, logistic or ridge regression on the run's samples or
    features; the run's network, trained on the labels alone; and the model with the clients'
    samples. Always the largest class, and extra trees on the labels, are shown beside them (the
    largest class is a linear answer, too: ridge regression with a large penalty).
    :func:`~lightning_fedssl.callbacks.answer.decide` chooses by cross-validation over the labels,
    validation samples and stated class shares, never by test samples. The last lines of the run,
    its page and ``result.json`` show one :class:`~lightning_fedssl.callbacks.answer.Answer`.

    The labels alone are :class:`~lightning_fedssl.algorithms.Supervised` with the network, the
    optimizer of the server, the schedule and the seed of the run, and as many steps as the server
    has made in it: ``bound/accuracy`` beside ``test/accuracy``. In a run that starts from the best
    linear answer and trains no other layer (``init_head: labels``) they are that answer. Logged are
    also ``simple/linear``, ``simple/trees``, ``simple/majority`` (the share of the largest class)
    and ``chosen/accuracy``. Of another task than classification ``bound/`` has its first metric,
    and no more is compared or chosen.

    It costs the server's share of the run once more. With labels at the clients (of which it
    warns), in a run of ``Supervised``, or one that was interrupted, it does nothing.

    Args:
        expected_gain: What the clients' samples are expected to add to the accuracy, before any
            evidence. The default is a loss, as on real tables and series. Where it is a gain, and
            the run is linear, the run is repeated for labels left out, five times as a rule.

    Attributes:
        answer: The answer of the run; None before its end.
    """

    saved = ("steps",)

    def __init__(self, expected_gain: float = EXPECTED_LOSS) -> None:
        self.expected_gain = expected_gain
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.steps = 0
        self.answer: Answer | None = None
        self.line = ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Warn of labels at the clients: a server without labels has no bound."""
        if stage == "fit" and trainer.datamodule.label_location != "server":
            _log.warning("LabelsAlone does nothing: data.label_location is clients")

    def on_server_batch_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, step: int
    ) -> None:
        """Count the steps of the server."""
        self.steps += 1

    def on_train_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Train the labels alone before the checkpoints and the result of the run are written."""
        if (
            trainer.interrupted
            or trainer.fast_dev_run
            or not (algorithm.trains_clients and self.steps)
        ):
            return
        task = trainer.datamodule.task
        chooses = "one class" in task.gives
        with TemporaryDirectory() as folder:
            # Every rank trains the same: preparing a run waits for all ranks of the process group.
            linear = algorithm.init_head == "labels" and trains_head_alone(algorithm.network)
            trained: dict[Name, Beside] = {}
            if chooses and (linear or _small_enough(trainer.datamodule)):
                trained["linear"] = trainer.train_beside(str(Path(folder, "linear")))
            if not (chooses and linear):
                alone = trainer.train_beside(str(Path(folder, "labels alone")), self.steps)
                trained["labels alone"] = alone
            name = f"test/{task.monitor}"
            bound = [*trained.values()][-1].metrics
            if name not in bound:
                _log.warning(
                    "the labels alone were not trained to the end: there is no bound/%s",
                    task.monitor,
                )
                return
            level = {f"bound/{task.monitor}": bound[name]}
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):  # a line beside the run's curve
                    logger.log_metrics(level, step=1)
                    logger.experiment.add_custom_scalars_multilinechart(
                        [f"val/{task.monitor}", *level], title=task.monitor
                    )
            trainer.log_metrics(level)
            if chooses:
                self._choose(trainer, algorithm, trained, Path(folder))
            else:
                ours = float(trainer.callback_metrics[name])
                noun = trainer.datamodule.spec.noun
                self.line = (
                    f"{name}: labels alone {bound[name]:.4f}, with the clients' {noun}s {ours:.4f}"
                )

    def on_fit_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Print the answer, the last lines of the run."""
        lines = self.answer.lines() if self.answer else [self.line] * bool(self.line)
        if lines:
            trainer.print("\n".join(lines))

    def _choose(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        trained: dict[Name, Beside],
        folder: Path,
    ) -> None:
        """Make the answer, and write the checkpoint of the chosen model."""
        data = trainer.datamodule
        linear = trained["linear"].trained.linear_answer if "linear" in trained else None
        candidates = []
        for name, alone in trained.items():
            left_out = linear.right if linear and name == "linear" else None
            candidates.append(candidate(trainer, name, alone.trained, left_out=left_out))
        expected = self.expected_gain
        right = None
        is_linear = "labels alone" not in trained
        can_repeat = is_linear and linear is not None and len(linear.right) > 0
        if can_repeat and expected > 0 and data.stated is None and cross_validates(trainer):
            right = left_out_with_clients(trainer, folder)
        ours = candidate(trainer, "with clients", algorithm, right, expected)
        chosen, reason = decide([*candidates, ours], stated_shares=data.stated is not None)
        path = FederatedCheckpoint.folder(trainer) / checkpoint_file.CHOSEN
        trainer.save_checkpoint(path, weights_only=True)
        if chosen is not ours and trainer.is_global_zero:
            shutil.copy(folder / chosen.name / "checkpoints/last.ckpt", path)
        shown = [largest_class(data), *candidates, ours]
        shown += trainer.gather(trees(data) if trainer.is_global_zero else [])[0]
        self.answer = Answer(
            shown,
            chosen,
            linear.name if linear else "",
            reason,
            data.test_labels.cpu(),
            data.spec.noun,
            export_command(path),
            data.stated is not None,
        )
        shares = {each.name: self.answer.accuracy(each) for each in shown}
        of_class = {"majority": "largest class", "linear": "linear", "trees": "trees"}
        logged = {f"simple/{key}": shares[name] for key, name in of_class.items() if name in shares}
        trainer.log_metrics({**logged, "chosen/accuracy": shares[chosen.name]})


def candidate(
    trainer: TrainerView,
    name: Name,
    algorithm: FederatedAlgorithm,
    left_out: Tensor | None = None,
    expected: float = EXPECTED_LOSS,
) -> Candidate:
    """A trained model as a candidate.

    Args:
        trainer: The run, whose samples it predicts.
        name: See :class:`~lightning_fedssl.callbacks.answer.Candidate`.
        algorithm: The method with the model.
        left_out: See there.
        expected: See there.
    """
    data = trainer.datamodule
    load_state(algorithm, algorithm.evaluated_model())
    algorithm.eval()
    predicted: dict[str, Tensor] = {}
    for stage in ("validate", "test"):
        classes = [data.test_labels[:0]]
        with torch.no_grad(), trainer.fabric.autocast():
            for x, _ in data.evaluation_batches(stage, trainer.dtype):
                classes.append(algorithm(x).argmax(1))
        predicted[stage] = torch.cat(classes).cpu()
    # Validation on the test samples proves nothing.
    usable = len(predicted["validate"]) > 0 and data.validation != "test"
    validated = predicted["validate"] == data.validation_labels.cpu() if usable else None
    return Candidate(name, predicted["test"], left_out, validated, expected=expected)


def cross_validates(trainer: TrainerView) -> bool:
    """Whether a run can be repeated on some of its labels: a run of seconds, in a simulation, that
    does not spend a privacy budget, and whose method offers it.
    """
    algorithm = trainer.algorithm
    offers = type(algorithm).anew is not FederatedAlgorithm.anew
    return offers and algorithm.federation.simulated and trainer.describe_privacy() is None


def left_out_with_clients(trainer: TrainerView, folder: Path) -> Tensor:
    """Whether labels are right that the server left out, while the clients trained as they do.

    Args:
        trainer: The run.
        folder: Where the checkpoints are written.

    Returns:
        ``(1, labels)``, for the parts of the first cross-validation.
    """
    server_data = trainer.local_data(sampling.SERVER)
    right = torch.zeros(1, len(server_data.labels), dtype=torch.bool)
    for training, left_out in folds(server_data.labels, 1)[0]:
        rows = torch.from_numpy(left_out)
        trained = trainer.train_beside(str(folder / "left out"), rows=torch.from_numpy(training))
        method = trained.trained
        load_state(method, method.evaluated_model())
        with torch.no_grad():
            classes = method.eval()(server_data.plain(server_data.labeled[rows])).argmax(1)
        right[0, rows] = (classes == server_data.labels[rows]).cpu()
    return right


def export_command(checkpoint: Path) -> str:
    """The command that exports a checkpoint; its path is relative where it lies below the current
    folder.
    """
    below = checkpoint.absolute().is_relative_to(Path.cwd())
    path = os.path.relpath(checkpoint) if below else str(checkpoint)
    return f"lightning-fedssl export --ckpt_path {shlex.quote(path)}"


def _small_enough(data: FederatedDataModule) -> bool:
    """Whether the best linear answer costs seconds."""
    labels = len(data.split.server_labeled)
    return labels * math.prod(data.in_shape) <= MOST_VALUES
