"""FedDB: pseudo-labels and aggregation weights without the bias of the class priors.

G. Zhu, X. Liu, X. Wu, S. Tang, C. Tang, J. Niu, H. Su, "Estimating before Debiasing: A Bayesian
Approach to Detaching Prior Bias in Federated Semi-Supervised Learning", IJCAI 2024, arXiv
2405.19789. Authors' code: github.com/GuogangZhu/FedDB.

A round:

1. the server sends the global model to the drawn clients;
2. a client predicts all of its images once; their mean prediction p_s (APP-U) estimates the prior
   of the model. The label of an image is the largest class of ``p / p_s``, divided by its sum, if
   that is at least tau;
3. it takes E steps, each on all of its labelled and all of its confident images,
   ``CE(weak, y) + CE(strong, label)``, and p_s follows: ``p_s <- (p_s + mean prediction of the weak
   views) / 2``;
4. the server chooses weights of the clients for which the mixture of their p_s is close to uniform,
   and averages with momentum.

As the code has it: the labelled images get pseudo-labels, too; a client without a confident image
trains on its labelled ones in batches; the weights start equal, and 100 times ``a <- softmax(a -
1.9 (gradient + 0.9 a))``, with the gradient of the mean squared error: a step of SGD with Nesterov
momentum 0.9 and weight decay 0.9, whose momentum does not last to the next step. As a gradient is
small, the weights stay within a few percent of equal ones.

What differs here: in the code, a client takes the unlabelled images with the numbers of its
labelled ones, which other clients hold; here it takes its labelled images, as the code's comment
says. The code evaluates batch norm by the statistics of the evaluated batch; here ``norm:
static_batch`` measures them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sums, WeightedSum
from lightning_fedssl.functional.optimizers import half_momentum
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.local_work import LocalWork, labeled_work
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

_PASS = 250
"""Images per forward pass when a client labels its images."""


@hyperparameters
class FedDB(ServerPhases):
    """FedDB with its ablations.

    Args:
        threshold: tau, the confidence from which a debiased pseudo-label is used (inclusive).
        debias_labels: Divide a prediction by p_s (DPL of the paper).
        debias_weights: Choose the aggregation weights by p_s (DMA of the paper).
        client_epochs: E, steps of a client in a round, each on all of its images.
        aggregation_optimizer: The optimizer of the server's step in the direction of the mean
            update.
        gradient_clip_norm: Largest gradient norm of a step.
        client_weighting: Without ``debias_weights``, a client's weight in the mean.
        keep_client_optimizer: A client's momentum persists until its next participation.
    """

    not_deployable = "needs the mean prediction of every client, which a node does not send"
    labels_at = "clients"

    local_modules = frozenset({"prior"})
    clients_use_statistics = True

    threshold: float = 0.95
    debias_labels: bool = True
    debias_weights: bool = True
    client_epochs: float = 5
    aggregation_optimizer: OptimizerCallable | None = half_momentum
    gradient_clip_norm: float | None = 1.0
    client_weighting: Literal["samples", "uniform"] = "uniform"
    keep_client_optimizer: bool = True

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.probability(self, "threshold")

    def build_parts(self) -> None:
        """Build the place of p_s at a client."""
        self.prior = nn.Module()
        self.prior.register_buffer("p_s", torch.zeros(self.num_classes or 0))

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Label the client's images; steps on all labelled and all confident images."""
        images = torch.cat([data.labeled, data.unlabeled])
        if not len(images):
            return labeled_work(data)
        pseudo = self.label_images(data, images)
        if not pseudo.mask.any() or not len(data.labeled):
            return labeled_work(data, self.client_epochs)
        chosen = images[pseudo.mask]
        labels = pseudo.labels[pseudo.mask]

        def batch(step: int) -> Batch:
            return {
                "x": data.weak(data.labeled, "labeled", step),
                "y": data.labels,
                "x_weak": data.weak(chosen, "weak", step),
                "x_strong": data.strong(chosen, "strong", step),
                "y_fix": labels,
            }

        return LocalWork(len(data.labeled) + len(chosen), max(1, round(self.client_epochs)), batch)

    @torch.no_grad()
    def label_images(self, data: LocalData, images: Tensor) -> PseudoLabels:
        """Labels by ``p / p_s`` of weak views, with the received model; p_s is stored in ``prior``.

        Args:
            data: The client's data.
            images: Indices of the images, ``(n,)``.
        """
        self.eval()
        starts = range(0, len(images), _PASS)
        parts = zip(images.split(_PASS), starts, strict=True)
        logits = torch.cat(
            [self(data.weak(part, "labeling", start=start)) for part, start in parts]
        ).to(data.dtype)
        p_s = logits.softmax(dim=-1).mean(dim=0)
        self.prior.get_buffer("p_s").copy_(p_s)
        return pseudo_label(logits - p_s.log() if self.debias_labels else logits, self.threshold)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``CE(weak, y) + CE(strong, label)``; p_s moves half-way to the mean prediction of the
        weak views.
        """
        loss = self.task.labeled_loss(self(batch["x"]), batch["y"])
        if "x_weak" not in batch:
            return loss
        with torch.no_grad():
            p_s = self.prior.get_buffer("p_s")
            p_s.copy_(0.5 * p_s + 0.5 * self(batch["x_weak"]).softmax(dim=-1).mean(dim=0))
        return loss + F.cross_entropy(self(batch["x_strong"]), batch["y_fix"])

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Upload p_s, if the server weighs by it."""
        p_s = self.prior.get_buffer("p_s").clone()
        return replace(update, payload={"p_s": p_s}) if self.debias_weights else update

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """Mean probabilities."""
        return {"p_s": (0, 1)}

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """The mean of the clients' models, which are all in memory: their weights depend on every
        p_s.
        """
        if not self.debias_weights:
            return super().accumulate(updates)
        on_device = [
            update.to(self.prior.get_buffer("p_s").device, copy=True) for update in updates
        ]
        total = WeightedSum()
        if on_device:
            weights = unbiased_weights(
                torch.stack([update.payload["p_s"] for update in on_device]).cpu()
            )
            for update, weight in zip(on_device, weights.tolist(), strict=True):
                total.add(update.model(), weight)
        return {"model": total}


def unbiased_weights(priors: Tensor, steps: int = 100) -> Tensor:
    """Weights of clients for which the mixture of their priors is close to uniform: ``(clients,)``,
    of sum 1.

    Args:
        priors: p_s of the clients, ``(clients, classes)``.
        steps: Steps of the search.
    """
    clients, classes = priors.shape
    weights = priors.new_full((clients,), 1 / clients)
    for _ in range(steps):
        gradient = 2 / classes * priors @ (weights @ priors - 1 / classes)
        weights = torch.softmax(weights - 1.9 * (gradient + 0.9 * weights), dim=0)
    return weights
