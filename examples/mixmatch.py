"""MixMatch and the Pi-Model: methods for pooled images, rows of SemiFL's Table 1.

In a checkout, on pooled digits; with more clients they are combined with FedAvg or FedProx:

    lightning-fedssl fit --config fixmatch_pooled_digits.yaml --config ablations/mixmatch.yaml
    lightning-fedssl fit --config fixmatch_pooled_digits.yaml --config ablations/pi_model.yaml

D. Berthelot et al., "MixMatch: A Holistic Approach to Semi-Supervised Learning", NeurIPS 2019,
arXiv 1905.02249; S. Laine, T. Aila, "Temporal Ensembling for Semi-Supervised Learning", ICLR 2017,
arXiv 1610.02242.

A round is that of :mod:`lightning_fedssl.algorithms.fixmatch`; a step differs. The Pi-Model: the
loss of unlabelled images is ``lambda_u mean (1/C) ||softmax(strong) - softmax(weak)||^2`` over all
of them, where the weak view's prediction is a target without gradient. MixMatch:

1. the guess for an unlabelled image is the mean prediction p of its two views, sharpened: ``q =
   p^(1/T) / sum p^(1/T)``;
2. labelled images with their classes, and both views with the guess, are one list. Each entry is
   mixed with another of a random permutation of the list, in the ratio ``max(lambda, 1 - lambda)``,
   ``lambda ~ Beta(a, a)`` for each;
3. the loss is ``lambda_s CE`` of the mixtures of labelled images ``+ lambda_u mean (1/C) ||q_mixed
   - softmax||^2`` of the others.

lambda_u grows linearly from 0 over the first 40 % of the rounds, as over that share of the steps in
the Pi-Model of MixMatch's authors, whose result is SemiFL's row; MixMatch's own grows over 16,000
steps. In the published experiments both views are weak (``data.strong: none``) and the model that
is evaluated is a moving average of the weights; ours are the last. The pass for the guesses does
not change the statistics of batch norm, as in the authors' code; theirs are of one of three mixed
batches, ours of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithms import FixMatch
from lightning_fedssl.algorithms.semifl import mixup
from lightning_fedssl.functional.dictionaries import call_with_weights
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.functional.pseudo_labels import PseudoLabels
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.state import Batch

RAMP = 0.4
"""The share of the run in which lambda_u grows."""

TEMPERATURE = 0.5
"""T of MixMatch's guesses, in all of the paper's experiments."""

ALPHA = 0.75
"""a of MixMatch's ratio, in all of the paper's experiments."""


@hyperparameters
class PiModel(FixMatch):
    """FedAvg with the Pi-Model at the clients; one client with all images for pooled data.

    Args:
        unlabeled_weight: lambda_u at its end. All images are trained on, whatever the threshold.
    """

    needs = "one class"

    unlabeled_weight: float = 10.0

    @property
    def reached(self) -> float:
        """The share of lambda_u in this round."""
        return min(1.0, self.current_round.progress / RAMP)

    def label(self, logits: Tensor, x_weak: Tensor, shift: Tensor | float = 0.0) -> PseudoLabels:
        """The probabilities of all weak views, ``(batch, classes)``."""
        return self.task.label(logits + shift, 0.0, soft=True)

    def unlabeled_loss(self, logits: Tensor, pseudo: PseudoLabels) -> Tensor:
        """The squared distance of predictions from targets, times the share of lambda_u."""
        return self.reached * F.mse_loss(self.task.probabilities(logits), pseudo.labels)


@hyperparameters
class MixMatch(PiModel):
    """FedAvg with MixMatch at the clients; one client with all images for pooled data.

    A client without labelled or without unlabelled images trains as in the Pi-Model.

    Args:
        unlabeled_weight: lambda_u at its end.
    """

    unlabeled_weight: float = 75.0

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Batches as of the base class, and for each image a partner and a ratio."""
        work = super().on_client_start(data)

        def batch(step: int) -> Batch:
            views = work.batch(step)
            count = sum(len(view) for name, view in views.items() if name != "y")
            drawn = data.rng("ratio", step).beta(ALPHA, ALPHA, size=count)
            ratio = torch.from_numpy(drawn).to(data.images.device, data.dtype, non_blocking=True)
            partner = data.permutation(count, "partner", step)
            return {**views, "ratio": torch.maximum(ratio, 1 - ratio), "partner": partner}

        return replace(work, batch=batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``CE`` of the mixed labelled images, the distances of the others, and the proximal term.

        Mixed targets have the mixed losses: cross-entropy is linear in them.
        """
        if "x" not in batch or "x_weak" not in batch:
            return super().training_step(batch, batch_idx)
        count, partner, ratio = len(batch["x"]), batch["partner"], batch["ratio"]
        images = torch.cat([batch["x"], batch["x_weak"], batch["x_strong"]])
        guess = self.guess(images[count:])
        targets = torch.cat([F.one_hot(batch["y"], guess.shape[1]), guess, guess])
        logits = self(mixup(images, images[partner], ratio))
        own = self.task.labeled_losses(logits[:count], batch["y"])
        other = self.task.entry_losses(logits[:count], targets[partner][:count])
        labeled = self.labeled_weight * mixup(own, other, ratio[:count]).mean()
        mixed = mixup(targets, targets[partner], ratio)[count:]
        distance = F.mse_loss(self.task.probabilities(logits[count:]), mixed)
        unlabeled = self.reached * self.unlabeled_weight * distance
        return self.with_proximal_term(labeled + unlabeled)

    @torch.no_grad()
    def guess(self, views: Tensor) -> Tensor:
        """The sharpened mean prediction of the first and the second half: ``(batch, classes)``."""
        found = self.task.probabilities(call_with_weights(self.network, {}, views))
        mean = torch.stack(found.chunk(2)).mean(dim=0)
        return torch.softmax(mean.log() / TEMPERATURE, dim=1)
