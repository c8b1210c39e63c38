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
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import has_pictures, show_figure, show_histogram
from lightning_fedssl.callbacks.metric_matrices import evaluated_on
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.tied import call_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        for key, value in (("every_n_rounds", every_n_rounds), ("images_per_client", images_per_client)):
            if value < 1:
                raise ValueError(f"ClientEvaluation.{key} is {value}: give 1 or more")
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
        self._unwritten: set[int] = set()
        self._waits = False
        self._written: set[int] = set()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the test images of other data."""
        self._indices = []

    def on_round_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Write the rows of the previous round if they still wait for an evaluation: no test follows that round."""
        if self._waits:
            self._write(trainer, trainer.round_index - 1)
            self._waits = False

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
        fitting = trainer.state.fn == TrainerFn.FITTING
        due = self._is_due(trainer) or evaluated_on(metrics) == "test"  # fit tests after its last round
        if fitting and (not due or trainer.round_index in self.history):
            return
        correct = self._correct(trainer, algorithm)
        found = [correct[indices].double().mean() for indices in self._images(trainer)]
        accuracies = self.history[trainer.round_index] = torch.stack(found)
        metrics |= summarize(accuracies)
        self._unwritten.add(trainer.round_index)
        show_histogram(trainer, "client_test/accuracy", accuracies[~accuracies.isnan()])
        if not fitting:
            self._write(trainer, trainer.round_index)

    def on_round_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        """Write the rows of the round; those of a round without an evaluation wait, because a test may follow it."""
        if self._is_due(trainer):
            self._waits = trainer.round_index not in self.history
            if not self._waits:
                self._write(trainer, trainer.round_index)

    def on_train_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Write the remaining rows and draw the heat map."""
        self._write(trainer, trainer.round_index)
        if self.history and has_pictures(trainer):
            show_figure(trainer, "client_test/accuracy", draw_heat_map(self.history))

    def state_dict(self) -> dict[str, Any]:
        """The clients' accuracies of the rounds so far."""
        return {"history": dict(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.history = dict(state_dict["history"])

    def _is_due(self, trainer: FederatedTrainer) -> bool:
        return trainer.round_index % self.every_n_rounds == 0 or trainer.round_index == trainer.max_rounds

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

    def _write(self, trainer: FederatedTrainer, last: int) -> None:
        """Append the rows that are not written yet; every rank must call it.

        Args:
            trainer: The trainer of the run.
            last: The last round whose clients have trained.
        """
        trained = {client: pair for part in trainer.gather(self._trained) for client, pair in part.items()}
        rounds = (self._unwritten | ({last} if trained else set())) - self._written
        self._trained, self._unwritten = {}, set()
        self._written |= rounds & self.history.keys()
        if not rounds or not trainer.is_global_zero or not trainer.log_dir:
            return
        path = Path(trainer.log_dir) / "client_evaluation.csv"
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(["round", "client", "accuracy", "before_training", "after_training"])
            for round_index in sorted(rounds):
                accuracies = self.history.get(round_index, torch.full((trainer.datamodule.num_clients,), math.nan))
                pairs = trained if round_index == last else {}
                for client, accuracy in enumerate(accuracies.tolist()):
                    numbers = (accuracy, *pairs.get(client, (math.nan, math.nan)))
                    writer.writerow([round_index, client, *("" if math.isnan(n) else f"{n:.6g}" for n in numbers)])


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


def draw_heat_map(history: dict[int, Tensor]) -> Figure:
    """A matplotlib figure: accuracy by client (rows) and round (columns).

    Args:
        history: The clients' accuracies, ``(clients,)``, by round.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rounds = sorted(history)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(
        torch.stack([history[r] for r in rounds], dim=1).numpy(), aspect="auto", vmin=0, vmax=1, interpolation="none"
    )
    ticks = range(0, len(rounds), max(1, len(rounds) // 8))
    axes.set(xlabel="round", ylabel="client", title="Test accuracy of the global model for each client")
    axes.set_xticks(ticks, [str(rounds[tick]) for tick in ticks])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.colorbar(picture, label="accuracy")
    return figure
