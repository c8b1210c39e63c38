"""(FL)^2: client-specific thresholds, sharpness-aware consistency and weights by learning status,
for very few labels.

S. Lee, T.-L. V. Le, J. Shin, S.-J. Lee, "(FL)^2: Overcoming Few Labels in Federated Semi-Supervised
Learning", NeurIPS 2024, arXiv 2410.23227. The labels, 40 of them in the released configuration, are
at the server.

A round, as the authors' code runs it:

1. before the first round the server trains on its labels (``pretrain_epochs``); then, as in SemiFL,
   static batch-norm statistics are computed, and both are sent to the drawn clients;
2. each client labels its images once with the received model: p_i are the probabilities of a weak
   view, q_i is the largest of them, and pbar is the mean of the p_i. Its learning status is ``t_k =
   mean(q_i)``. It uses the images with ``q_i >= t_k pbar(c) / max(pbar)``, where c is the class of
   the label;
3. each client takes E epochs over these images on
   ``CE(f_w(strong), label) + sum_(q_i >= tau) KL(f_w(strong) || f_(w + eps)(strong)) / batch``. The
   step eps of ASAM raises the cross-entropy of the images with ``q_i >= tau`` most. Neither eps nor
   the target has a gradient;
4. the server averages with weights ``1 - t_k``, a step with momentum, and trains on its labels.

The paper's ablations switch off one part each: ``adaptive_threshold``, ``rho: 0`` and
``status_weighting: false``. Without all three, and without pretraining, it is SemiFL without its
mix loss.

Where paper and code differ, the default is the code's variant: the target of the consistency term
is the strong view (paper: the weak view; ``consistency_target``), and the learning rate is constant
(its configuration names a cosine, but nothing in the code steps it). The order of the pretraining's
batches is drawn as that of a round 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.func import grad

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.semifl import GlobalLabels
from lightning_fedssl.data.local_data import LocalData, Visits
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import call_with_weights, map_values
from lightning_fedssl.functional.losses import masked_mean
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, at_least_float32
from lightning_fedssl.functional.sharpness import asam_step
from lightning_fedssl.local_work import LocalWork, labeled_work, unlabeled_work
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.round import Federation


@hyperparameters
class FL2(GlobalLabels):
    """(FL)^2 with its ablations.

    Args:
        threshold: tau, the confidence from which an image enters the sharpness-aware term
            (inclusive).
        adaptive_threshold: Use images from each client's own threshold t_k, scaled by class; if
            not, from tau.
        rho: Radius of ASAM's step; 0 leaves out the sharpness-aware term. The paper's is 0.1, and 1
            for CIFAR-100.
        eta: ASAM's constant, added to the absolute value of a weight.
        consistency_target: The view whose prediction at w is the target of the sharpness-aware
            term.
        status_weighting: A client's weight in the mean is ``1 - t_k``, by its learning status; if
            not, ``client_weighting``.
        pretrain_epochs: Epochs of the server over its labelled images before the first round.
    """

    same_step_every_round = True
    needs = "classes"
    soft_labels = True

    threshold: float = 0.95
    adaptive_threshold: bool = True
    rho: float = 0.1
    eta: float = 0.01
    consistency_target: Literal["strong", "weak"] = "strong"
    status_weighting: bool = True
    pretrain_epochs: float = 50

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 0, "rho", "pretrain_epochs")
        checks.above_zero(self, "eta")

    @property
    def client_payload(self) -> State:
        """A tensor like the one that a client sends in addition to its model: its learning
        status, a scalar.
        """
        weight = next(iter(self.server.parameters.values()))
        return {"status": at_least_float32(weight).new_zeros(())} if self.status_weighting else {}

    def round(self, federation: Federation) -> None:
        """SemiFL's round; before the first one the server trains on its labels."""
        if self.current_round.index == 1 and self.pretrain_epochs:
            federation.train_server()
        super().round(federation)

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Epochs over the labelled images.

        The first phase of round 1 is the pretraining, drawn as of a round 0.
        """
        if self.current_round.index == 1 and self.pretrain_epochs:
            data = replace(data, round=data.round - 1)
        if data.round == 0:
            return labeled_work(data, self.pretrain_epochs, view=self.server_view)
        return super().on_server_start(data)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Pseudo-label all images, and use those from the client's threshold on; t_k is sent with
        the update.
        """
        if not len(data.unlabeled):
            return unlabeled_work(data)
        probabilities, confidence, sure = self.label_images(data)
        labels = self.task.hard(probabilities)
        status = confidence.mean()
        pseudo = PseudoLabels(labels, confidence, sure)
        if self.adaptive_threshold:
            thresholds = status * self.task.frequency(probabilities, labels)
            pseudo = pseudo._replace(mask=confidence >= thresholds)
        targets = self.task.confident_targets(pseudo)
        sure = sure & pseudo.mask
        used = self.task.any_confident(pseudo).nonzero().squeeze(1)

        def make_batch(rows: Tensor, visits: Visits) -> Batch:
            x = data.unlabeled[used[rows]]
            batch = {
                "x_strong": data.strong(x, "strong", visits=visits),
                "y": data.target(targets[used[rows]], "weak", visits=visits),
                "sure": data.target(sure[used[rows]], "weak", visits=visits),
            }
            if self.consistency_target == "weak":
                batch["x_weak"] = data.weak(x, "weak", visits=visits)
            return batch

        work = self.epochs_over(data, len(used), make_batch, pseudo)
        return replace(work, payload={"status": status} if self.status_weighting else {})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy, and the sharpness-aware consistency of sure images."""
        logits = self(batch["x_strong"])
        loss = self.task.loss(logits, batch["y"])
        if self.rho == 0:
            return loss
        trained = self.server.parameters
        weights: State = {
            name: w for name, w in self.network.named_parameters() if f"network.{name}" in trained
        }
        target = (
            self._logits(weights, batch["x_weak"]) if self.consistency_target == "weak" else logits
        )
        raised = self._logits(self._raised(weights, batch), batch["x_strong"])
        divergences = self.task.divergences(raised, self.task.probabilities(target.detach()))
        return loss + (divergences * batch["sure"]).mean()

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """The learning status is a mean of probabilities, from 0 to 1."""
        return {"status": (0, 1)}

    def client_weight(self, update: ClientUpdate) -> float:
        """``1 - t_k``, or as ``client_weighting`` says."""
        if not self.status_weighting:
            return super().client_weight(update)
        return 1 - float(update.payload["status"].clamp(0, 1))  # rounding

    def _raised(self, weights: State, batch: Batch) -> State:
        """The weights after ASAM's step against the cross-entropy of the sure images: w + eps."""

        def sure_loss(candidate: State) -> Tensor:
            logits = self._logits(candidate, batch["x_strong"])
            return masked_mean(self.task.entry_losses(logits, batch["y"]), batch["sure"])

        with torch.no_grad():
            steps = asam_step(weights, grad(sure_loss)(weights), self.rho, self.eta)
        return map_values(torch.add, weights, steps)

    def _logits(self, weights: State, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` with other weights; buffers stay as they are."""
        return at_least_float32(call_with_weights(self.network, weights, x))
