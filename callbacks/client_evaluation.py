"""Evaluates the global model, and each client's own, for every client: are they fair?"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.dictionaries import starting_with
from lightning_fedssl.state import load_state
from lightning_fedssl.storage.files import write_table

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.functional.averaging import State
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView


IMAGES = 100
"""Test images that are drawn for a client; with replacement if a class has too few."""


class ClientEvaluation(FederatedCallback):
    """Evaluates the global model for every client, on test images with the client's class
    distribution.

    If the data module has test images for each client, these are used. Otherwise test images are
    drawn once per client, with the class distribution of its training images. The callback logs
    ``client_test/accuracy_mean``, ``client_test/accuracy_std`` (over the clients) and
    ``client_test/accuracy_worst_tenth`` (the mean of the worst tenth of the clients). It writes
    ``client_evaluation.csv`` into the run folder, with one row per client and round. Checkpoints
    hold the accuracies (8 bytes per client and round), so that a resumed run continues the
    file. Where clients keep weights for themselves (``model.personal``), the same is logged of each
    client's own model as ``client_test/personal_accuracy_mean`` and so on, which are then those of
    the file; a client that has not trained yet has the global model. The callback does not affect
    training. It uses the clients' true labels only for the class distribution.

    After ``fit``, ``history`` has the accuracies of all clients, ``(clients,)``, by round; NaN
    without test images.

    It evaluates the rounds in which the trainer evaluates its model, and the last one.
    """

    saved = ("history",)

    def __init__(self) -> None:
        self._indices: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.history: dict[int, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the test images of other data.

        Refuse data loaders and tasks whose samples have no single class.
        """
        data = trainer.datamodule
        if not data.class_names or "one class" not in data.task.gives:
            raise ValueError(
                "trainer.callbacks: ClientEvaluation needs one class label for each sample, which "
                "data loaders do not show and other tasks do not have: leave it out"
            )
        self._indices = []

    def on_evaluation_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Evaluate the model for every client, and add the results to the round's metrics."""
        number = trainer.round_index
        is_test = bool(starting_with("test/", metrics))  # fit tests after its last round
        if trainer.training and not (is_test or trainer.evaluates_now):
            return
        accuracies = self._accuracies(trainer, algorithm, lambda _: algorithm.server.personal)
        metrics |= summarize(accuracies)
        if algorithm.clients.with_state("personal"):  # nodes do not show theirs
            accuracies = self._accuracies(trainer, algorithm, algorithm.own_part)
            metrics |= summarize(accuracies, "client_test/personal_accuracy")
        self.history.setdefault(number, accuracies)
        self._write(trainer)  # also where the round was before a kill: the folder is another

    def _images(self, trainer: TrainerView) -> list[Tensor]:
        """Indices of each client's test images, drawn in the first call."""
        if not self._indices:
            data = trainer.datamodule
            labels = data.test_labels.cpu()
            for client, counts in enumerate(data.statistics.class_counts):
                samples = data.client_test_indices(client)
                if samples is None:
                    samples = draw_like(counts, labels, IMAGES, trainer.seed, client)
                self._indices.append(samples)
        return self._indices

    def _accuracies(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, part: Callable[[int], State]
    ) -> Tensor:
        """The accuracy on each client's test images, ``(clients,)``, NaN without any.

        The clients are divided among the ranks.

        Args:
            trainer: The run.
            algorithm: The evaluated model.
            part: The personal weights with which a client's images are classified.
        """
        images = self._images(trainer)
        accuracies = torch.zeros(len(images), dtype=torch.float64)
        for client in range(trainer.global_rank, len(images), trainer.world_size):
            load_state(algorithm, part(client))
            test_rows = images[client]
            right = torch.zeros((), dtype=torch.float64)
            with torch.no_grad(), trainer.fabric.autocast():
                for x, y in trainer.datamodule.evaluation_batches(
                    "test", trainer.dtype, indices=test_rows
                ):
                    right += (algorithm.network(x).argmax(dim=1) == y).sum().cpu()
            accuracies[client] = right / len(test_rows)
        load_state(algorithm, algorithm.server.personal)
        return torch.stack(trainer.gather(accuracies)).sum(dim=0)

    def _write(self, trainer: TrainerView) -> None:
        """Write the rows of all rounds, those before a resumed checkpoint too."""
        if not trainer.is_global_zero or not trainer.log_dir:
            return
        names = trainer.datamodule.client_names or range(trainer.datamodule.num_clients)
        rows: list[tuple[object, ...]] = [("round", "client", "accuracy")]
        for number, accuracies in self.history.items():
            for client, accuracy in zip(names, accuracies.tolist(), strict=True):
                rows.append((number, client, "" if math.isnan(accuracy) else f"{accuracy:.6g}"))
        write_table(Path(trainer.log_dir) / "client_evaluation.csv", rows)


def draw_like(class_counts: Tensor, labels: Tensor, count: int, seed: int, client: int) -> Tensor:
    """Indices of ``count`` images with a client's class distribution; none for a client without
    images.

    The numbers per class are rounded by the largest remainders. A class without enough images is
    drawn with replacement.

    Args:
        class_counts: The client's number of images of each class, ``(classes,)``.
        labels: Labels of the images to draw from, ``(images,)``.
        count: Number of images to draw.
        seed: The run's seed.
        client: The client's index, on which the random numbers depend.
    """
    present = torch.bincount(labels, minlength=len(class_counts)) > 0
    weights = class_counts.double() * present
    if weights.sum() == 0:
        return labels.new_zeros(0)
    exact = count * weights / weights.sum()
    quota = exact.floor().long()
    quota[(exact - quota).argsort(descending=True, stable=True)[: count - int(quota.sum())]] += 1
    generator = sampling.rng(seed, "client evaluation", client)
    parts = []
    for k in quota.nonzero().flatten().tolist():
        images = (labels == k).nonzero().flatten()
        number = int(quota[k])
        chosen = generator.choice(images.numpy(), number, replace=number > len(images))
        parts.append(torch.from_numpy(chosen))
    return torch.cat(parts)


def summarize(accuracies: Tensor, name: str = "client_test/accuracy") -> Metrics:
    """Mean, standard deviation over the clients and mean of the worst tenth; empty without any
    accuracy.

    Args:
        accuracies: One per client, ``(clients,)``; NaN for a client without images.
        name: The beginning of the scalars' names.
    """
    ordered = accuracies[~accuracies.isnan()].sort().values
    if not len(ordered):
        return {}
    return {
        f"{name}_mean": float(ordered.mean()),
        f"{name}_std": float(ordered.std(correction=0)),
        f"{name}_worst_tenth": float(ordered[: math.ceil(len(ordered) / 10)].mean()),
    }
