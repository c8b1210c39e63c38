"""FedAvg and FedProx with FixMatch at the clients: the usual baseline of federated semi-supervised
learning.

K. Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence",
NeurIPS 2020, arXiv 2001.07685, combined with McMahan et al., AISTATS 2017 or Li et al., MLSys 2020.
Papers on federated semi-supervised learning use this combination in different variants; arguments
choose among them.

A round:

1. the server sends the global weights w to the drawn clients;
2. each takes local steps: the strong view of an unlabelled image is trained with the class that the
   current model predicts for the weak view, if it is confident, ``lambda_u sum(mask CE(strong,
   label)) / batch``, and with labels at the clients a labelled batch in addition, ``lambda_s CE``;
   FedProx adds ``mu/2 ||w_k - w||^2``;
3. the server averages, weighted by the number of images, and with labels at the server trains on
   them: ``after`` the aggregation, ``before`` the clients, or in ``parallel`` with them.

With labels at the server and long local training, wrong pseudo-labels reinforce themselves:
FedMatch's paper reports 11.95 % on CIFAR-10 (ICLR 2021, Table 1). That is a property of the
combination, not of the configurations of this package.

Where sites state how frequent their classes are (``data.class_shares``), the logits of weak views
are shifted so that the received model's mean probabilities over a client's images are these shares:
distribution alignment of ReMixMatch (D. Berthelot et al., ICLR 2020, arXiv 1911.09785) with the
shares that a site knows in place of those of the labels.

One client with all images (``data.num_clients: 1``, labels at the clients) is FixMatch on pooled
data: an upper bound of what the unlabelled images can contribute.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from lightning_fedssl.algorithm import Place
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.site_shares import received_shift
from lightning_fedssl.algorithms.common.views import logits_of_views
from lightning_fedssl.algorithms.fedavg import FedAvg
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.losses import added
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_work import LocalWork, labeled_work, side_by_side, unlabeled_work
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters
from lightning_fedssl.task import Need


@hyperparameters
class FixMatch(FedAvg):
    """FedAvg with FixMatch at the clients; FedProx with ``prox_mu`` above 0.

    Args:
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        labeled_weight: lambda_s, of the cross-entropy on labelled images, at clients and server.
        unlabeled_weight: lambda_u, of the cross-entropy on pseudo-labels.
        unlabeled_ratio: mu: a step has ``mu * data.client_batch_size`` unlabelled images.
        label_mode: How a batch is labelled: in the forward pass of the training step (``train``, as
            in FixMatch), or in a separate pass in evaluation mode (``eval``). The difference
            affects batch norm and dropout only.
        client_steps: Steps of a client in a round; if left out, ``client_epochs`` over its
            unlabelled images (its labelled ones if it has no others). With 0 no client trains: the
            bound of the server's labels alone.
        server_epochs: Epochs of the server over its labelled images, where it has some.

    Example:
        >>> from lightning_fedssl import CNN
        >>> method = FixMatch(network=CNN, threshold=0.8, client_epochs=5, server_steps=20)
        >>> method.threshold, method.client_epochs
        (0.8, 5)
    """

    same_step_every_round = True
    needs: ClassVar[Need] = "confidence"
    labels_at: ClassVar[Place | None] = None
    needs_unlabeled = True
    uses_class_shares = True

    threshold: float = 0.95
    labeled_weight: float = 1.0
    unlabeled_weight: float = 1.0
    unlabeled_ratio: int = 1
    label_mode: Literal["train", "eval"] = "train"
    client_steps: int | None = None
    server_epochs: float = 1

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.probability(self, "threshold")
        checks.at_least(self, 0, "labeled_weight", "unlabeled_weight", "client_steps")
        checks.at_least(self, 1, "unlabeled_ratio")
        self.clients_use_statistics |= self.label_mode == "eval"

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Batches of both views of unlabelled images, and of labelled images in addition if the
        client has some.
        """
        if not len(data.unlabeled):
            return labeled_work(data, self.client_epochs, self.client_steps)
        size = self.unlabeled_ratio * data.batch_size
        steps = self.client_steps
        unlabeled = unlabeled_work(
            data,
            epochs=self.client_epochs,
            steps=steps,
            batch_size=size,
            shift=received_shift(self, data),
        )
        return side_by_side(unlabeled, labeled_work(data, steps=unlabeled.num_steps))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``lambda_s CE(x, y) + lambda_u sum(mask CE(strong, label)) / batch``, and the proximal
        term.
        """
        pseudo = self.label_batch(batch)
        names = ("x", "x_strong") if pseudo else ("x", "x_weak", "x_strong")
        logits = logits_of_views(self, batch, names)
        terms = []
        if "x" in logits:
            terms.append(self.labeled_weight * self.labeled_loss(logits["x"], batch["y"]))
        if "x_strong" in logits:
            pseudo = pseudo or self.label(
                logits["x_weak"].detach(), batch["x_weak"], *_shift(batch)
            )
            terms.append(self.unlabeled_weight * self.unlabeled_loss(logits["x_strong"], pseudo))
            self.log("client/mask_rate", pseudo.mask.double().mean(), batch_size=len(pseudo.mask))
        return self.with_proximal_term(added(terms))

    def labeled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of labelled images at clients and server, before lambda_s: the task's.

        Args:
            logits: ``(batch, classes)``.
            labels: ``(batch,)``.
        """
        return self.task.labeled_loss(logits, labels)

    def label(self, logits: Tensor, x_weak: Tensor, shift: Tensor | float = 0.0) -> PseudoLabels:
        """Pseudo-labels of the weak views.

        Args:
            logits: ``(batch, classes)``, without gradient.
            x_weak: The weak views, ``(batch, channels, height, width)``.
            shift: What the client's class shares add to logits, ``(batch, classes)``; given if it
                has stated some.
        """
        return self.task.label(logits + shift, self.threshold)

    def unlabeled_loss(self, logits: Tensor, pseudo: PseudoLabels) -> Tensor:
        """The loss of the strong views, before lambda_u: ``sum(mask CE(strong, label)) / batch``.

        Args:
            logits: ``(batch, classes)``.
            pseudo: The labels of the same images.
        """
        return self.task.consistency_loss(logits, pseudo)

    def label_batch(self, batch: Batch) -> PseudoLabels | None:
        """Label the weak views in a separate pass in evaluation mode; None if the training pass
        labels them.
        """
        if self.label_mode == "train" or "x_weak" not in batch:
            return None
        with evaluating(self):
            return self.label(self(batch["x_weak"]), batch["x_weak"], *_shift(batch))

    def server_training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``lambda_s CE(x, y)``."""
        return self.labeled_weight * self.labeled_loss(self(batch["x"]), batch["y"])


def _shift(batch: Batch) -> list[Tensor]:
    """The shift of a batch whose client has stated its class shares; else an empty list."""
    return [batch["shift"]] if "shift" in batch else []
