"""Fed-Pseudo: federated averaging with pseudo-labels made by the model in training.

D.-H. Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural Networks", ICML 2013
workshop, combined with FedAvg as a baseline of Fed-SHVR (arXiv 2111.00010, section V), which names the combination and
specifies nothing; all details are ours.

A round:

1. the server sends theta to the clients;
2. each takes tau_k steps on ``CE(labelled) + alpha_0 CE(unlabelled, argmax f)``, the labels from the same pass;
3. the server averages, weighted by the number of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.paired_work import Ramp, RampShape, check_labeled_clients, local_steps, paired_work
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.state import Batch, LocalWork

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule


class PseudoLabel(FederatedAlgorithm):
    """FedAvg with pseudo-labelling at clients that hold labelled and unlabelled images.

    A client without images of one kind drops the term it has none for.

    Args:
        alpha0: Final value of alpha_0, the weight of the unlabelled cross-entropy.
        ramp_epochs: Local epochs over which alpha_0 grows from 0; 0 for its final value from the start.
        ramp_shape: ``linear``, or ``exponential``: ``exp(-5 (1 - x)^2)``.
        client_epochs: E.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(
        self,
        alpha0: float = 1.0,
        ramp_epochs: float = 50,
        ramp_shape: RampShape = "linear",
        client_epochs: float = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(client_epochs=client_epochs, **kwargs)
        self.ramp = Ramp(alpha0, ramp_epochs, ramp_shape)

    def configure_callbacks(self) -> list[Callback]:
        """The spread of tau_k."""
        from lightning_fedssl.callbacks import LocalSteps

        return [LocalSteps()]

    def check_data(self, data: FederatedDataModule) -> None:
        """Labels must be at the clients, and every client needs an image."""
        check_labeled_clients(data, type(self).__name__)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Draw tau_k batches of labelled and unlabelled images."""
        steps = local_steps(data, self.client_epochs)
        weight = self.ramp.values(data.round, self.client_epochs, steps).to(data.images.device, data.dtype)
        return paired_work(data, steps, unlabeled=lambda _, step: {"alpha0": weight[step]})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """``CE(x, y) + alpha_0 CE(u, argmax f(u))``."""
        logits = self(torch.cat([batch[name] for name in ("x", "u") if name in batch]))
        count = len(batch["y"]) if "y" in batch else 0
        terms = [F.cross_entropy(logits[:count], batch["y"])] if count else []
        if "u" in batch:
            losses = F.cross_entropy(logits[count:], logits[count:].detach().argmax(dim=-1), reduction="none")
            terms.append((batch["alpha0"] * losses).mean())
        return sum(terms[1:], start=terms[0])
