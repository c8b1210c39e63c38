"""Measures the losses on labelled and on unlabelled images after either stage of a round (Semi-SFL,
Fig. 3).

In a checkout: ``--trainer.callbacks+=examples.diagnostics.stage_losses.StageLosses``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.losses import consistency_losses
from lightning_fedssl.functional.pseudo_labels import pseudo_label
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.run import TrainerView


class StageLosses(FederatedCallback):
    """Logs the losses on labelled and on unlabelled images when the server has trained, and at the
    end of a round.

    Training on labelled images at the server changes the loss on unlabelled images, and training at
    the clients changes that on labelled ones: Fig. 3 of Semi-SFL (arXiv 2307.15870) shows one
    stage's loss while the other stage trains. The scalars are ``after_server/supervised_loss``,
    ``after_server/unlabeled_loss``, ``after_round/supervised_loss`` and
    ``after_round/unlabeled_loss``.

    The supervised loss is the mean cross-entropy of the server's labelled images without
    augmentation. The loss on unlabelled images is the mean consistency loss of the clients' images:
    the evaluated model (for Semi-SFL the teacher) labels the weak view, and the network is applied
    to the strong view. Images below the threshold count as 0. Networks are in evaluation mode,
    except that static batch norm uses the statistics of the measured batch: those of the global
    model are older than its weights. Contrastive losses are left out. Training stays the same.

    Args:
        max_images: Maximum number of labelled images, and of unlabelled images, evenly spaced in
            data-set order.
        threshold: tau, the confidence from which a pseudo-label counts (inclusive).
    """

    def __init__(self, max_images: int = 1000, threshold: float = 0.95) -> None:
        at_least(1, max_images=max_images)
        self.max_images = max_images
        self.threshold = threshold

    def on_train_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Refuse a server without labelled images, and clients without images.

        Raises:
            ValueError: The labels are not at the server, or no client has an image.
        """
        if not len(trainer.local_data(sampling.SERVER).labeled):
            raise ValueError(
                "StageLosses needs labelled data at the server: set data.label_location to "
                "server, or remove the "
                "callback"
            )
        if not len(trainer.datamodule.unlabeled_pool()):
            raise ValueError(
                "StageLosses needs data at the clients: lower data.num_labels, or remove the "
                "callback"
            )

    def on_server_phase_end(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Log the losses of the model that the server has trained."""
        self._log(trainer, algorithm, "after_server")

    def on_global_model(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Log the losses of the round's last model."""
        self._log(trainer, algorithm, "after_round")

    def _log(self, trainer: TrainerView, algorithm: FederatedAlgorithm, stage: str) -> None:
        data = trainer.local_data(sampling.SERVER)
        with evaluating(algorithm, batch_statistics=True), trainer.fabric.autocast():
            trainer.log(f"{stage}/unlabeled_loss", self._unlabeled_loss(trainer, algorithm, data))
            trainer.log(f"{stage}/supervised_loss", self._supervised_loss(trainer, algorithm, data))

    def _unlabeled_loss(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, data: LocalData
    ) -> float:
        """The mean consistency loss; afterwards the working module holds the global model."""
        batches = self._batches(trainer, trainer.datamodule.unlabeled_pool().to(data.images.device))
        load_state(algorithm, algorithm.evaluated_model())
        labels = [
            pseudo_label(
                algorithm(data.weak(images, "stage losses, weak", start=start)), self.threshold
            )
            for start, images in batches
        ]
        load_state(algorithm, algorithm.server.model())
        losses = [
            consistency_losses(
                algorithm(data.strong(images, "stage losses, strong", start=start)), pseudo
            )
            for (start, images), pseudo in zip(batches, labels, strict=True)
        ]
        return float(torch.cat(losses).mean())

    def _supervised_loss(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, data: LocalData
    ) -> float:
        """The mean cross-entropy of the working module on the labelled images."""
        places = self._batches(trainer, torch.arange(len(data.labeled), device=data.images.device))
        losses = [
            algorithm.task.labeled_losses(algorithm(data.plain(data.labeled[at])), data.labels[at])
            for _, at in places
        ]
        return float(torch.cat(losses).mean())

    def _batches(self, trainer: TrainerView, indices: Tensor) -> list[tuple[int, Tensor]]:
        """At most ``max_images`` of some indices, evenly spaced, as batches with the place of their
        first one.
        """
        count = min(len(indices), self.max_images)
        chosen = indices[torch.arange(count, device=indices.device) * len(indices) // count]
        size: Any = trainer.datamodule.eval_batch_size
        return [(start, chosen[start : start + size]) for start in range(0, count, size)]
