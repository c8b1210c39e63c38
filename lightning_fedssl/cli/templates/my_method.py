"""MyMethod: one sentence on what is new. (Authors, "Title", venue, link.)

One round:

1. The server sends its model to the clients of the round.
2. Every client trains on its unlabelled images: a confident prediction for the weak view labels the
   strong view.
3. The server averages the clients' models, weighted by their numbers of images.
4. The server trains on its labelled images for ``server_epochs`` epochs.

Deviations from the paper, each with its reason: none yet.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl import FederatedAlgorithm, hyperparameters
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork, unlabeled_work


@hyperparameters
class MyMethod(FederatedAlgorithm):
    """One sentence on the method.

    Args:
        threshold: tau, the confidence from which a pseudo-label is trained on, from 0 to 1.
        server_epochs: Epochs of the server in a round.
    """

    threshold: float = 0.95
    server_epochs: float = 1

    def check_arguments(self) -> None:
        """Refuse a threshold that is not a probability."""
        super().check_arguments()
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"model.threshold is {self.threshold}: give a number from 0 to 1")

    def on_client_start(self, data: LocalData) -> LocalWork:
        """The work of a client in a round: batches of its unlabelled images."""
        return unlabeled_work(data, epochs=self.client_epochs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of a client's batch.

        ``x_weak`` and ``x_strong`` are views of the same images ``(batch, ...)``.
        """
        confidence, labels = self(batch["x_weak"]).detach().softmax(dim=-1).max(dim=-1)
        mask = confidence >= self.threshold
        self.log("client/mask_rate", mask.double().mean(), batch_size=len(mask))
        losses = F.cross_entropy(self(batch["x_strong"]), labels, reduction="none")
        loss: Tensor = (mask * losses).mean()
        return loss
