"""Methods whose clients label their images once a round with the received model, and whose server has the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData, Visits
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.local_work import LocalWork, epochs_of
from lightning_fedssl.state import Batch

_PASS = 250
"""Images per forward pass when a client labels its images."""


class GlobalLabels(ServerPhases):
    """The setting of SemiFL's authors' code; the base class of the methods.

    Args:
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        server_momentum: beta_g, the momentum of the server's step in the direction of the mean update; with 0
            the server takes the plain mean.
        client_epochs: E, local epochs of a client in a round.
        server_epochs: E, epochs of the server's fine-tuning in a round.
        gradient_clip_norm: Largest gradient norm of a step.
        client_weighting: A client's weight in the mean: its number of ``samples``, or ``uniform``.
        keep_client_optimizer: A client's momentum persists until its next participation.
        keep_server_optimizer: The server's momentum persists between rounds.
        kwargs: The arguments of :class:`~lightning_fedssl.algorithms.common.server_phases.ServerPhases`.

    Attributes:
        soft_labels: Whether labels are probabilities instead of classes.
    """

    soft_labels: bool = False

    def __init__(
        self,
        threshold: float = 0.95,
        server_momentum: float = 0.5,
        client_epochs: float = 5,
        server_epochs: float = 5,
        gradient_clip_norm: float | None = 1.0,
        client_weighting: Literal["samples", "uniform"] = "uniform",
        keep_client_optimizer: bool = True,
        keep_server_optimizer: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            server_momentum=server_momentum,
            client_epochs=client_epochs,
            server_epochs=server_epochs,
            gradient_clip_norm=gradient_clip_norm,
            client_weighting=client_weighting,
            keep_client_optimizer=keep_client_optimizer,
            keep_server_optimizer=keep_server_optimizer,
            **kwargs,
        )
        checks.probability("threshold", threshold)
        self.threshold = threshold

    def configure_callbacks(self) -> list[Callback]:
        """Compute static batch-norm statistics, and log the pseudo-labels' quality (SemiFL, Fig. 6)."""
        from lightning_fedssl.callbacks import PseudoLabelQuality, StaticBatchNorm

        return [*([StaticBatchNorm()] if has_static_batch_norm(self) else []), PseudoLabelQuality()]

    def check_data(self, data: FederatedDataModule) -> None:
        """Labels must be at the server, and the clients need unlabelled images."""
        checks.labels_at(data, "server", type(self).__name__)
        checks.has_unlabeled(data, type(self).__name__)
        super().check_data(data)

    @torch.no_grad()
    def label_images(self, data: LocalData) -> PseudoLabels:
        """Labels of all the client's unlabelled images by the working module in eval mode, one weak view each."""
        self.eval()
        starts = range(0, len(data.unlabeled), _PASS)
        parts = data.unlabeled.split(_PASS)
        logits = [self(data.weak(part, "labeling", start=start)) for part, start in zip(parts, starts, strict=True)]
        return pseudo_label(torch.cat(logits).to(data.dtype), self.threshold, soft=self.soft_labels)

    def epochs_over(
        self, data: LocalData, count: int, make_batch: Callable[[Tensor, Visits], Batch], pseudo: PseudoLabels | None
    ) -> LocalWork:
        """E epochs over ``count`` images in random order.

        Args:
            data: The client's data.
            count: The number of images; 0 gives no steps.
            make_batch: Returns the tensors of rows from 0 to below ``count``, of whose visits it draws random numbers.
            pseudo: The labels of all the client's images, for diagnostics.
        """
        return epochs_of(
            make_batch,
            lambda epoch: data.permutation(count, "order", epoch),
            count=count,
            batch_size=data.batch_size,
            epochs=self.client_epochs,
            pseudo_labels=pseudo,
            chunk=data.chunk,
        )
