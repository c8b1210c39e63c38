"""Trains the labels alone after a run, so that the result says whether the clients' images helped."""

from __future__ import annotations

import logging
import shutil
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.checkpoint import FederatedCheckpoint
from lightning_fedssl.storage import checkpoint_file

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.trainer import FederatedTrainer

_log = logging.getLogger(__name__)


class LabelsAlone(FederatedCallback):
    """Trains the server's labels alone after the last round, and compares both models on the test images.

    The bound is :class:`~lightning_fedssl.algorithms.Supervised` with the network, the optimizer of the server, the
    schedule and the seed of the run, and as many steps as the server has made in it. Its test accuracy is logged as
    ``bound/accuracy`` beside ``test/accuracy``, and the last line of the run compares the two. Its best model by
    validation is ``checkpoints/labels_alone.ckpt``, which ``export`` takes if it is better on the validation images
    than ``best.ckpt``.

    It needs labels at the server, and costs the server's share of the run once more. In a run of ``Supervised``, or
    one that was interrupted, it does nothing.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.steps = 0
        self.verdict = ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse labels at the clients: a server without labels has no bound."""
        if stage == "fit" and trainer.datamodule.label_location != "server":
            raise ValueError(
                "LabelsAlone trains the server's labels, and data.label_location is clients: leave it out of "
                "trainer.callbacks"
            )

    def on_server_batch_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, step: int) -> None:
        """Count the steps of the server."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.steps = state_dict["steps"]

    def on_train_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Train the bound before the checkpoints and the result of the run are written."""
        ended = trainer.state.status != TrainerStatus.INTERRUPTED
        if not (ended and algorithm.trains_clients and self.steps and not trainer.fast_dev_run):
            return
        # Every rank trains the same bound: preparing a run waits for all ranks of the process group.
        bound = trainer.gather(train_labels_alone(trainer, algorithm, self.steps))[0]
        if bound is None:
            _log.warning("the labels alone were not trained to the end: there is no bound/accuracy")
            return
        trainer.log_metrics({"bound/accuracy": bound})
        accuracy, data = float(trainer.callback_metrics["test/accuracy"]), trainer.datamodule
        self.verdict = verdict(bound, accuracy, len(data.test_labels), data.spec.noun)

    def on_fit_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Print the comparison, the last line of the run."""
        if self.verdict and trainer.enable_progress_bar and trainer.is_global_zero:
            if reason := checkpoint_file.better_of(FederatedCheckpoint.folder(trainer) / "best.ckpt")[1]:
                print(reason)
            print(self.verdict, flush=True)


def verdict(bound: float, accuracy: float, images: int, noun: str) -> str:
    """The comparison in one line.

    Args:
        bound: Test accuracy of the labels alone, from 0 to 1.
        accuracy: Test accuracy with the clients' samples.
        images: Test samples.
        noun: What a sample is called.
    """
    difference = round((accuracy - bound) * images)
    points = f"{'better' if difference > 0 else 'worse'} by {100 * abs(accuracy - bound):.1f} points"
    count = f"{abs(difference)} {noun}{'' if abs(difference) == 1 else 's'}"
    return (
        f"labels alone {100 * bound:.1f} %, with the clients' {noun}s {100 * accuracy:.1f} %: "
        f"{points if difference else 'no difference'} ({images} test {noun}s: {count})"
    )


def train_labels_alone(trainer: FederatedTrainer, algorithm: FederatedAlgorithm, steps: int) -> float | None:
    """Train the labels alone on this rank by itself; rank 0 keeps the model beside the checkpoints of the run.

    Args:
        trainer: The trainer of the run.
        algorithm: The method of the run.
        steps: Steps of the server in the run.

    Returns:
        The test accuracy of the last model; None if a signal ended the training.
    """
    from lightning_fedssl import FederatedTrainer, Supervised  # as a script would: a run of its own

    rounds, device = trainer.round_index, trainer.fabric.device
    bound = Supervised.of(algorithm, ceil(steps / rounds))
    with TemporaryDirectory() as folder:
        alone = FederatedTrainer(
            max_rounds=rounds, clients_per_round=1, accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1 if device.index is None else [device.index], precision=trainer.precision, logger=False,
            check_val_every_n_rounds=trainer.check_val_every_n_rounds, deterministic=trainer.deterministic,
            enable_progress_bar=False, default_root_dir=folder,
        )  # fmt: skip
        alone.fit(bound, trainer.datamodule)
        if alone.state.status == TrainerStatus.INTERRUPTED:
            return None
        written = Path(folder, "checkpoints")
        best = written / ("best.ckpt" if (written / "best.ckpt").is_file() else "last.ckpt")
        if trainer.is_global_zero:
            target = FederatedCheckpoint.folder(trainer) / checkpoint_file.LABELS_ALONE
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(best, target)
    return float(alone.callback_metrics["test/accuracy"])
