"""Evaluates the model for every client: fairness of the global model, and the effect of local training."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.callbacks.boards import has_pictures, show_figure, show_histogram
from lightning_fedssl.callbacks.client_pictures import draw_clients
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.tied import call_with

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.functional.averaging import State
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.state import ClientUpdate
    from lightning_fedssl.trainer import FederatedTrainer

_NETWORK = "network."


class ClientEvaluation(FederatedCallback):
    """Evaluates the global model for every client, on test images with the client's class distribution.

    If the data module has test images for each client, these are used. Otherwise test images are drawn once per client,
    with the class distribution of its training images. The callback logs ``client_test/accuracy_mean``,
    ``client_test/accuracy_std`` (over the clients) and ``client_test/accuracy_worst_tenth`` (the mean of the worst
    tenth of the clients). It writes ``client_evaluation.csv`` into the run folder, with one row per client and round.
    TensorBoard gets a histogram of each round and, at the end, a heat map of clients and rounds. Checkpoints hold the
    accuracies (8 bytes per client and round), so that a resumed run continues the heat map. The callback does not
    affect training. It uses the clients' true labels only for the class distribution.

    After ``fit``, ``history`` has the accuracies of all clients, ``(clients,)``, by round; NaN without test images.

    Args:
        every_n_rounds: Interval of the evaluations; a round is skipped if the trainer does not evaluate its model in
            it. The last round is always evaluated.
        images_per_client: Number of test images that are drawn for a client; with replacement if a class has too few.
        before_and_after: Also evaluate, for every client that trains, the model that it receives and its model
            after training; in split learning with the server's part after the same steps.
            ``client_test/accuracy_before_training`` and ``client_test/accuracy_after_training`` are the means over the
            clients whose updates the server accepts; the file has the values of the same clients.
    """

    def __init__(self, every_n_rounds: int = 1, images_per_client: int = 100, before_and_after: bool = False) -> None:
        at_least(1, every_n_rounds=every_n_rounds, images_per_client=images_per_client)
        self.every_n_rounds = every_n_rounds
        self.images_per_client = images_per_client
        self.before_and_after = before_and_after
        self._indices: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.history: dict[int, Tensor] = {}
        self._before: dict[int, float] = {}
        self._trained: dict[int, tuple[float, float]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the test images of other data."""
        self._indices = []

    def on_client_start(
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, data: LocalData, work: LocalWork
    ) -> None:
        """Evaluate the model that a client receives; the working module holds it."""
        if self.before_and_after and self._is_due(trainer) and work.num_steps:
            self._before[data.party] = self._accuracy(trainer, algorithm, data.party, {})

    def on_client_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, update: ClientUpdate) -> None:
        """Evaluate a client's model after training."""
        before = self._before.pop(update.client, math.nan)
        if math.isnan(before):
            return
        state = {**algorithm.server.model(), **update.parameters, **update.buffers}
        if isinstance(algorithm, JointAlgorithm):  # the working module holds the server's part, trained in this round
            state = {name: t for name, t in state.items() if algorithm.at_clients(name)}
        after = self._accuracy(trainer, algorithm, update.client, state)
        self._trained[update.client] = (before, after)
        trainer.log("client_test/accuracy_before_training", before)
        trainer.log("client_test/accuracy_after_training", after)

    def on_client_judged(
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, client: int, accepted: bool
    ) -> None:
        """Forget a client that is late or rejected, as the means do."""
        if not accepted:
            self._trained.pop(client, None)

    def on_evaluation_end(
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, metrics: dict[str, float]
    ) -> None:
        """Evaluate the model for every client at the interval, and add the results to the round's metrics."""
        fitting, is_test = trainer.state.fn == TrainerFn.FITTING, any(name.startswith("test/") for name in metrics)
        if fitting and not self._is_due(trainer) and not is_test:  # fit tests after its last round
            return
        correct = self._correct(trainer, algorithm)
        found = [correct[indices].double().mean() for indices in self._images(trainer)]
        accuracies = torch.stack(found)
        metrics |= summarize(accuracies)
        if trainer.round_index not in self.history:
            self.history[trainer.round_index] = accuracies
            self._write(trainer, accuracies)
            show_histogram(trainer, "client_test/accuracy", accuracies[~accuracies.isnan()])

    def on_train_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Draw the heat map."""
        if self.history and has_pictures(trainer):
            rounds = {number: dict(enumerate(found.tolist())) for number, found in self.history.items()}
            title = "Test accuracy of the global model for each client"
            show_figure(trainer, "client_test/accuracy", draw_clients(rounds, trainer.datamodule.num_clients, title))

    def state_dict(self) -> dict[str, Any]:
        """The clients' accuracies of the rounds so far."""
        return {"history": dict(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.history = dict(state_dict["history"])

    def _is_due(self, trainer: FederatedTrainer) -> bool:
        last = trainer.round_index == trainer.max_rounds
        return trainer.evaluates_now and (last or trainer.round_index % self.every_n_rounds == 0)

    def _images(self, trainer: FederatedTrainer) -> list[Tensor]:
        """Indices of each client's test images, drawn in the first call."""
        if not self._indices:
            data, count, seed = trainer.datamodule, self.images_per_client, trainer.seed
            labels, class_counts = data.test_labels.cpu(), data.statistics.class_counts
            for client, counts in enumerate(class_counts):
                own = data.client_test_indices(client)
                self._indices.append(draw_like(counts, labels, count, seed, client) if own is None else own)
        return self._indices

    def _accuracy(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, client: int, state: State) -> float:
        """Accuracy of a model, or of the working module for an empty state, on a client's test images; NaN if none.

        No statistics of static batch norm belong to the weights of a client, so those of each batch are used.
        """
        network, indices = algorithm.network, self._images(trainer)[client]
        weights = {name.removeprefix(_NETWORK): t for name, t in state.items() if name.startswith(_NETWORK)}
        right = torch.zeros((), dtype=torch.int64, device=trainer.fabric.device)
        with evaluating(network, batch_statistics=True), trainer.fabric.autocast():
            for part in indices.split(trainer.datamodule.eval_batch_size):
                images, labels = trainer.datamodule.test_batch(part, trainer.dtype)
                right += (call_with(network, weights, images).argmax(dim=1) == labels).sum()
        return float(right) / len(indices) if len(indices) else math.nan

    def _correct(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> Tensor:
        """Whether the evaluated model classifies each test image correctly; the batches are divided among the ranks."""
        rank, ranks = trainer.global_rank, trainer.world_size
        batches = trainer.datamodule.evaluation_batches("test", trainer.dtype, shard=(rank, ranks))
        mine = []
        with torch.no_grad(), trainer.fabric.autocast():
            for x, y in batches:
                mine.append((algorithm.network(x).argmax(dim=1) == y).cpu())
        shares = trainer.gather(mine)
        return torch.cat([share[i] for i in range(max(map(len, shares))) for share in shares if i < len(share)])

    def _write(self, trainer: FederatedTrainer, accuracies: Tensor) -> None:
        """Append the rows of the round; every rank must call it."""
        trained = {client: pair for part in trainer.gather(self._trained) for client, pair in part.items()}
        self._trained = {}
        if not trainer.is_global_zero or not trainer.log_dir:
            return
        path = Path(trainer.log_dir) / "client_evaluation.csv"
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(["round", "client", "accuracy", "before_training", "after_training"])
            for client, accuracy in enumerate(accuracies.tolist()):
                numbers = (accuracy, *trained.get(client, (math.nan, math.nan)))
                texts = ("" if math.isnan(number) else f"{number:.6g}" for number in numbers)
                writer.writerow([trainer.round_index, client, *texts])


def draw_like(class_counts: Tensor, labels: Tensor, count: int, seed: int, client: int) -> Tensor:
    """Indices of ``count`` images with a client's class distribution; none for a client without images.

    The numbers per class are rounded by the largest remainders. A class without enough images is drawn with
    replacement.

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
    wanted = exact.floor().long()
    wanted[(exact - wanted).argsort(descending=True, stable=True)[: count - int(wanted.sum())]] += 1
    generator = sampling.rng(seed, "client evaluation", client)
    drawn = []
    for k in wanted.nonzero().flatten().tolist():
        images, number = (labels == k).nonzero().flatten(), int(wanted[k])
        drawn.append(images[torch.from_numpy(generator.choice(len(images), number, replace=number > len(images)))])
    return torch.cat(drawn)


def summarize(accuracies: Tensor) -> dict[str, float]:
    """Mean, standard deviation over the clients and mean of the worst tenth; empty without any accuracy.

    Args:
        accuracies: One per client, ``(clients,)``; NaN for a client without images.
    """
    known = accuracies[~accuracies.isnan()].sort().values
    if not len(known):
        return {}
    return {
        "client_test/accuracy_mean": float(known.mean()),
        "client_test/accuracy_std": float(known.std(correction=0)),
        "client_test/accuracy_worst_tenth": float(known[: math.ceil(len(known) / 10)].mean()),
    }
