"""Local work of clients with labelled and unlabelled images: every step has a batch of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.losses import added
from lightning_fedssl.functional.optimizers import plain_sgd
from lightning_fedssl.local_work import LocalWork, local_steps, paired_work
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters


@dataclass(frozen=True)
class Ramp:
    """The weight alpha_0 of the unlabelled loss, which grows from 0 to its final value over the
    first local epochs.

    Args:
        final: The final value.
        epochs: Local epochs until it is reached; 0 for the final value from the start.
    """

    final: float = 1.0
    epochs: float = 50.0

    def values(self, round_index: int, local_epochs: float, num_steps: int) -> Tensor:
        """The weight at every step of a round: ``(num_steps,)`` float64.

        Args:
            round_index: The round, from 1.
            local_epochs: E, epochs of a round.
            num_steps: tau_k, steps of the client in this round.
        """
        if self.epochs == 0:
            return torch.full((num_steps,), self.final, dtype=torch.float64)
        inside = torch.arange(num_steps, dtype=torch.float64) * local_epochs / max(num_steps, 1)
        done = (round_index - 1) * local_epochs + inside.floor()
        return self.final * (done / self.epochs).clamp(max=1.0)

    def on_device(self, data: LocalData, local_epochs: float, num_steps: int) -> Tensor:
        """The weight at every step of a client's round, as its images are in type and device.

        Args:
            data: The client's data.
            local_epochs: E, epochs of a round.
            num_steps: tau_k, steps of the client in this round.
        """
        weights = self.values(data.round, local_epochs, num_steps)
        return weights.to(data.images.device, data.dtype, non_blocking=True)


@hyperparameters
class PairedBatches(FederatedAlgorithm, ABC):
    """Methods whose clients add a loss on unlabelled images to the cross-entropy of labelled ones.

    The loss of a client without images of one kind has no terms for them.

    Args:
        alpha0: Final value of alpha_0, the weight of the unlabelled loss.
        ramp_epochs: Local epochs over which alpha_0 grows from 0; 0 for its final value from the
            start.
        optimizer: The optimizer of a client's steps.
        client_epochs: E.
    """

    labels_at = "clients"

    alpha0: float = 1.0
    ramp_epochs: float = 50
    optimizer: OptimizerCallable = plain_sgd
    client_epochs: float = 2

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 0, "alpha0", "ramp_epochs")
        self.ramp = Ramp(self.alpha0, self.ramp_epochs)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Draw tau_k batches of labelled and unlabelled images."""
        steps = local_steps(data, self.client_epochs)
        weight = self.ramp.on_device(data, self.client_epochs, steps)
        return paired_work(data, steps, unlabeled=lambda _, step: {"alpha0": weight[step]})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy of the labelled images and the method's terms of the unlabelled ones, in
        one pass.
        """
        logits = self(torch.cat([batch[name] for name in ("x", "u") if name in batch]))
        count = len(batch["y"]) if "y" in batch else 0
        terms = [self.task.labeled_loss(logits[:count], batch["y"])] if count else []
        if "u" in batch:
            terms += self.unlabeled_terms(logits[count:], batch)
        return added(terms)

    @abstractmethod
    def unlabeled_terms(self, logits: Tensor, batch: Batch) -> list[Tensor]:
        """The terms of the loss on unlabelled images, at least one.

        Args:
            logits: Of the unlabelled images, ``(unlabelled, classes)``.
            batch: The batch, with ``alpha0``, the weight of each image: ``(unlabelled,)``.
        """
