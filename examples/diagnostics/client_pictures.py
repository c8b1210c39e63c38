"""Pictures for the logger: heat maps of the clients, and the pseudo-labels that are wrong and
confident.

In a checkout: ``lightning-fedssl fit --config semifl_digits.yaml
--trainer.callbacks+=examples.diagnostics.client_pictures.ClientHeatMaps``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.callbacks.boards import has_pictures, show_figure
from lightning_fedssl.callbacks.pseudo_label_quality import clients_left_out
from lightning_fedssl.functional.pseudo_labels import PseudoLabels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import Run
    from lightning_fedssl.state import ClientUpdate

_Label = tuple[float, int, int, int, bool]
"""A pseudo-label: its confidence, the number of its image, its class, the true class, and whether
it is trained on."""

_Labels = tuple[Tensor, Tensor, Tensor, Tensor]
"""Pseudo-labels of a step: the numbers of their images, their classes, their confidences and their
mask."""

TITLES = {
    "mask_rate": "share of confident pseudo-labels",
    "update_norm": "length of the update",
}


class ClientHeatMaps(FederatedCallback):
    """Draws heat maps client x round for the logger: ``clients/mask_rate`` and
    ``clients/update_norm``.

    The mask rate needs a method that labels before the client's first step (SemiFL). It is 0 for a
    client that was drawn and has no confident image; such a client does not train and has no
    update. The update is the client's weights minus those that it received: the global ones, or
    those of its group or slot (FedRGD, EASGD, Overlap Local-SGD).

    Args:
        every_n_rounds: Draw after every n-th round, and after the last one. Every round is
            recorded.
    """

    def __init__(self, every_n_rounds: int = 50) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.history: dict[str, dict[int, dict[int, float]]] = {name: {} for name in TITLES}
        self._found: dict[str, dict[int, Tensor]] = {name: {} for name in TITLES}

    def on_client_start(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Record the mask rate of a client that computed pseudo-labels for the round."""
        if work.pseudo_labels is not None and len(work.pseudo_labels.mask):
            self._found["mask_rate"][data.party] = work.pseudo_labels.mask.double().mean()

    def on_client_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Record the length of a client's update."""
        received = algorithm.broadcast(update.client)
        pairs = [
            (t, received[name].to(t.device))
            for name, t in update.parameters.items()
            if name in received
        ]
        moved = torch.stack([(after - before).norm() for after, before in pairs])
        self._found["update_norm"][update.client] = moved.double().norm()

    def on_global_model(self, trainer: Run, algorithm: FederatedAlgorithm) -> None:
        """Combine what all ranks recorded in this round."""
        for name, found in self._found.items():
            parts = trainer.gather({client: float(value) for client, value in found.items()})
            if values := {client: value for part in parts for client, value in part.items()}:
                self.history[name][trainer.round_index] = values
            found.clear()

    def on_pictures(self, trainer: Run, algorithm: FederatedAlgorithm, is_last: bool) -> None:
        """Draw at the interval."""
        if (is_last or trainer.round_index % self.every_n_rounds == 0) and has_pictures(trainer):
            for name, rounds in self.history.items():
                if rounds:
                    figure = draw_clients(rounds, trainer.datamodule.num_clients, TITLES[name])
                    show_figure(trainer, f"clients/{name}", figure)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded so far."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.history = state_dict["history"]


class PseudoLabelGallery(FederatedCallback):
    """Shows wrong pseudo-labels in the logger: images, their weak and strong views, and the
    confidences of all labels.

    ``pseudo_label/most_confident_wrong`` has a column for each image of the most confident wrong
    pseudo-labels of the round, and ``pseudo_label/confidence`` is a histogram. A label below the
    threshold, which is not trained on, is marked "not used". For methods whose pseudo-labels
    callbacks can see, such as SemiFL, and for images; the histogram is for all data. The labels of
    a client whose update was rejected do not count. True labels are used for these pictures
    only: no weight depends on them.

    Args:
        every_n_rounds: Show every n-th round, and the last one.
        images: Number of columns.
    """

    def __init__(self, every_n_rounds: int = 50, images: int = 8) -> None:
        at_least(1, every_n_rounds=every_n_rounds, images=images)
        self.every_n_rounds = every_n_rounds
        self.images = images
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._labels: dict[int, list[_Labels]] = defaultdict(list)

    def on_round_start(self, trainer: Run, algorithm: FederatedAlgorithm) -> None:
        """Forget the round before."""
        self._labels.clear()

    def on_client_start(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Collect the pseudo-labels that a client computed for the round."""
        if work.pseudo_labels is not None and len(work.pseudo_labels.mask):
            self.on_pseudo_labels(trainer, algorithm, data.unlabeled, work.pseudo_labels)

    def on_pseudo_labels(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        indices: Tensor,
        pseudo: PseudoLabels,
    ) -> None:
        """Collect pseudo-labels of a step, as copies on the device: whether they are shown is not
        known yet.
        """
        client = algorithm.clients.staging
        assert client is not None, "pseudo-labels are reported while their client trains"
        labels = pseudo.labels if pseudo.labels.dim() == 1 else pseudo.labels.argmax(dim=1)
        confidence = pseudo.confidence.detach().clone()
        self._labels[client].append(
            (indices.clone(), labels.clone(), confidence, pseudo.mask.bool())
        )

    def on_pictures(self, trainer: Run, algorithm: FederatedAlgorithm, is_last: bool) -> None:
        """Combine the pseudo-labels of the accepted clients of all ranks, and show them."""
        if not is_last and trainer.round_index % self.every_n_rounds:
            return
        unused = clients_left_out(trainer)
        used = [
            labels
            for client, steps in self._labels.items()
            if client not in unused
            for labels in steps
        ]
        own = [
            (self._most_confident_wrong(trainer, labels), labels[2].float().cpu())
            for labels in used
        ]
        everyone = [found for part in trainer.gather(own) for found in part]
        wrong = _most_confident(
            [entry for entries, _ in everyone for entry in entries], self.images
        )
        confidences = [t for _, t in everyone]
        if confidences:
            show_histogram(trainer, "pseudo_label/confidence", torch.cat(confidences))
        is_image = (
            trainer.datamodule.in_shape[0] in (1, 3) and len(trainer.datamodule.in_shape) == 3
        )
        if wrong and is_image and has_pictures(trainer):
            show_figure(trainer, "pseudo_label/most_confident_wrong", self._draw(trainer, wrong))

    def _most_confident_wrong(self, trainer: Run, of_step: _Labels) -> list[_Label]:
        indices, labels, confidence, mask = of_step
        truth = trainer.datamodule.true_labels(indices)
        wrong = (labels != truth) & (truth >= 0)
        confidence, rows = confidence.masked_fill(~wrong, -1.0).topk(min(self.images, len(labels)))
        columns = (confidence, indices[rows], labels[rows], truth[rows], mask[rows])
        found = zip(*(column.tolist() for column in columns), strict=True)
        return [entry for entry in found if entry[0] >= 0]

    @staticmethod
    def _draw(trainer: Run, wrong: list[_Label]) -> Figure:
        """The images (first row) with a weak and a strong view."""
        from matplotlib.figure import Figure

        data = trainer.local_data(0)
        indices = torch.tensor([index for _, index, *_ in wrong], device=data.images.device)
        rows = {
            "image": data.plain(indices),
            "weak": data.weak(indices, "gallery"),
            "strong": data.strong(indices, "gallery"),
        }
        names = trainer.datamodule.spec.class_names
        figure = Figure(figsize=(1.3 * len(wrong) + 0.6, 4.6), layout="constrained")
        grid = figure.subplots(3, len(wrong), squeeze=False)
        for line, (title, views) in zip(grid, rows.items(), strict=True):
            for axes, x, (confidence, _, label, truth, used) in zip(
                line, views.float().cpu(), wrong, strict=True
            ):
                scaled = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-6)
                axes.imshow(scaled.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray")
                axes.set(xticks=[], yticks=[])
                if title == "image":
                    unused = "" if used else ", not used"
                    axes.set_title(
                        f"{names[label]}\nis {names[truth]}\n{confidence:.0%}{unused}", fontsize=8
                    )
            line[0].set_ylabel(title)
        return figure


def _most_confident(entries: list[_Label], count: int) -> list[_Label]:
    """The most confident label of each image, for at most ``count`` images.

    Several steps may label an image.
    """
    of_images = {entry[1]: entry for entry in sorted(entries)}
    return sorted(of_images.values(), reverse=True)[:count]


def show_histogram(trainer: Run, name: str, values: Tensor) -> None:
    """Log a histogram for the current round, if there are values; MLflow has none.

    Args:
        trainer: The trainer of the run.
        name: The histogram's tag.
        values: ``(n,)``, on the CPU.
    """
    for logger in trainer.loggers if trainer.is_global_zero and len(values) else ():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, values, trainer.round_index)
        elif isinstance(logger, WandbLogger):
            import wandb  # type: ignore[import-not-found, unused-ignore]

            histogram: Any = wandb.Histogram(values.tolist())
            logger.log_metrics({name: histogram}, trainer.round_index)


def draw_clients(rounds: dict[int, dict[int, float]], num_clients: int, title: str) -> Figure:
    """A heat map of a value over clients (rows) and rounds (columns).

    White where a client has no value.

    Args:
        rounds: The clients' values by round.
        num_clients: M.
        title: What the value is.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    table = torch.full((num_clients, max(rounds)), torch.nan)
    for number, values in rounds.items():
        for client, value in values.items():
            table[client, number - 1] = value
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    extent = (0.5, max(rounds) + 0.5, num_clients - 0.5, -0.5)
    picture = axes.imshow(table.numpy(), aspect="auto", interpolation="nearest", extent=extent)
    axes.set(xlabel="round", ylabel="client", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.colorbar(picture)
    return figure
