"""Trains the labels alone after a run: the result then says whether the clients' images helped."""

from __future__ import annotations

import logging
import math
import shutil
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


CHOSEN = "chosen.ckpt"
"""The checkpoint of a run that ``export`` takes if none is named."""


class LabelsAlone(FederatedCallback):
    """Trains the server's labels alone after the last round, and compares both models on the test
    images.

    The bound is :class:`~lightning_fedssl.algorithms.Supervised` with the network, the optimizer of
    the server, the schedule and the seed of the run, and as many steps as the server has made in
    it. Its test accuracy is logged as ``bound/accuracy`` beside ``test/accuracy``, and the last
    line of the run compares the two.

    ``checkpoints/chosen.ckpt`` is what ``export`` takes if no checkpoint is named: the last model;
    the best one by validation, if it is better by two standard errors, as after a collapse (the
    best of many measurements on few images is often chance); or the last model of the labels alone,
    if that is better on the validation images.

    It needs labels at the server, and costs the server's share of the run once more. In a run of
    ``Supervised``, or one that was interrupted, it does nothing.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.steps = 0
        self.verdict = self.choice = ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse labels at the clients: a server without labels has no bound."""
        if stage == "fit" and trainer.datamodule.label_location != "server":
            raise ValueError(
                "LabelsAlone trains the server's labels, and data.label_location is clients: "
                "leave it out of "
                "trainer.callbacks"
            )

    def on_server_batch_end(
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, step: int
    ) -> None:
        """Count the steps of the server."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.steps = state_dict["steps"]

    def on_train_end(  # type: ignore[override]
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm
    ) -> None:
        """Train the bound before the checkpoints and the result of the run are written."""
        ended = trainer.state.status != TrainerStatus.INTERRUPTED
        if not (ended and algorithm.trains_clients and self.steps and not trainer.fast_dev_run):
            return
        with TemporaryDirectory() as folder:
            # Every rank trains the same bound: preparing a run waits for all ranks of the process
            # group.
            metrics = trainer.gather(train_labels_alone(trainer, algorithm, self.steps, folder))[0]
            if "test/accuracy" not in metrics:
                _log.warning(
                    "the labels alone were not trained to the end: there is no bound/accuracy"
                )
                return
            trainer.log_metrics({"bound/accuracy": metrics["test/accuracy"]})
            self.choice = choose(
                trainer, metrics.get("val/accuracy", 0.0), Path(folder, "checkpoints/last.ckpt")
            )
        accuracy, data = float(trainer.callback_metrics["test/accuracy"]), trainer.datamodule
        self.verdict = verdict(
            metrics["test/accuracy"], accuracy, len(data.test_labels), data.spec.noun
        )

    def on_fit_end(  # type: ignore[override]
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm
    ) -> None:
        """Print the comparison, the last line of the run."""
        if self.verdict and trainer.enable_progress_bar and trainer.is_global_zero:
            print(*filter(None, (self.choice, self.verdict)), sep="\n", flush=True)


def verdict(bound: float, accuracy: float, images: int, noun: str) -> str:
    """The comparison in one line.

    Args:
        bound: Test accuracy of the labels alone, from 0 to 1.
        accuracy: Test accuracy with the clients' samples.
        images: Test samples.
        noun: What a sample is called.
    """
    difference = round((accuracy - bound) * images)
    points = (
        f"{'better' if difference > 0 else 'worse'} by {100 * abs(accuracy - bound):.1f} points"
    )
    count = f"{abs(difference)} {noun}{'' if abs(difference) == 1 else 's'}"
    return (
        f"labels alone {100 * bound:.1f} %, with the clients' {noun}s {100 * accuracy:.1f} %: "
        f"{points if difference else 'no difference'} ({images} test {noun}s: {count})"
    )


def choose(trainer: FederatedTrainer, bound: float, labels_alone: Path) -> str:
    """Write the checkpoint that ``export`` takes; every rank must call it.

    Args:
        trainer: The trainer of the run, with its last model.
        bound: Validation accuracy of the labels alone.
        labels_alone: The checkpoint of the labels alone.

    Returns:
        Which model is taken and why, in one line; empty if it is the last one of the run.
    """
    folder = FederatedCheckpoint.folder(trainer)
    chosen, best = folder / CHOSEN, folder / "best.ckpt"
    last = ours = float(trainer.callback_metrics.get("val/accuracy", math.inf))
    trainer.save_checkpoint(chosen, weights_only=True)
    if not trainer.is_global_zero or last == math.inf:
        return ""
    line = ""
    highest = checkpoint_file.load(best)["metrics"]["val/accuracy"] if best.is_file() else 0.0
    error = math.sqrt(highest * (1 - highest) / len(trainer.datamodule.validation_labels))
    if highest - last > 2 * error:
        shutil.copy(best, chosen)
        ours, line = (
            highest,
            f"export takes the best model: val/accuracy {100 * highest:.1f} %, in the end "
            f"{100 * last:.1f} %",
        )
    if bound > ours:
        shutil.copy(labels_alone, chosen)
        line = (
            f"export takes the labels alone: val/accuracy {100 * bound:.1f} %, "
            f"with the clients {100 * ours:.1f} %"
        )
    return line and f"{line} (--ckpt_path last takes the last model)"


def train_labels_alone(
    trainer: FederatedTrainer, algorithm: FederatedAlgorithm, steps: int, folder: str
) -> dict[str, float]:
    """Train the labels alone on this rank by itself.

    Args:
        trainer: The trainer of the run.
        algorithm: The method of the run.
        steps: Steps of the server in the run.
        folder: Where the checkpoints are written.

    Returns:
        The last scalars; without those of the test if a signal ended the training.
    """
    from lightning_fedssl import FederatedTrainer, Supervised  # as a script would: a run of its own

    rounds, device = trainer.round_index, trainer.fabric.device
    bound = Supervised.of(algorithm, math.ceil(steps / rounds))
    alone = FederatedTrainer(
        max_rounds=rounds,
        clients_per_round=1,
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=trainer.precision,
        logger=False,
        check_val_every_n_rounds=trainer.check_val_every_n_rounds,
        deterministic=trainer.deterministic,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    log = logging.getLogger("lightning_fedssl")
    level = log.level
    log.setLevel(logging.ERROR)  # the run itself has warned of its data
    try:
        alone.fit(bound, trainer.datamodule)
    finally:
        log.setLevel(level)
    return {name: float(value) for name, value in alone.callback_metrics.items()}
