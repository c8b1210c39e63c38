"""SAGE: pseudo-labels corrected by the gap between a client's confidence and the global model's.

Y. Liu, X. Shang, Y. Zhang, Y. Lu, C. Gong, J.-H. Xue, H. Wang, "Mind the Gap: Confidence
Discrepancy Can Guide Federated Semi-Supervised Learning Across Pseudo-Mismatch", CVPR 2025, arXiv
2503.13227. A part of every client's images is labelled.

A round, as the authors' code runs it:

1. the server sends the global weights to the drawn clients;
2. each takes E times ``floor(n / B)`` steps, with n its images, labelled ones included. A step has
   a batch of B labelled images, and mu B of all n without their labels. Such an image is labelled
   twice: by the model in training (class y_l, confidence c_l) and by the received global model in
   evaluation mode (y_g, c_g). With ``lambda = exp(-kappa |c_l - c_g|)``, its target is ``lambda y_l
   + (1 - lambda) y_g`` where ``c_l >= tau``, and y_g elsewhere. It is used where one of the two
   confidences is at least tau: ``L = CE(x, y) + lambda_u sum(mask KL(target || strong)) / batch``;
3. the server averages, weighted by the number of images.

Deviations: a client's momentum starts at zero (in the code one optimizer trains all clients in
turn, and its momentum goes from each client to the next); an image counts once for the weight of
its client (in the code a labelled one counts 2,001 times; the code's clients have equally many); a
client with fewer than B labelled images takes all of them in each step (the code repeats the
labelled images and shuffles the whole, so that a batch may hold an image twice and epochs do not
balance; both iterators restart there in each local epoch); 1e-6 and 1e-10 are not added to gap and
probabilities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.received_model import ReceivedModelLabels
from lightning_fedssl.functional.losses import kl_divergence
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, at_least_float32, pseudo_label
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class SAGE(ReceivedModelLabels):
    """FixMatch whose pseudo-labels are corrected by the received global model.

    Labels are at every client.

    Args:
        half_gap: The gap of the two confidences at which both classes count one half; ``kappa = ln
            2 / half_gap``.
    """

    same_step_every_round = True

    half_gap: float = 0.05

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.above_zero(self, "half_gap")
        self.kappa = math.log(2) / self.half_gap

    def label(self, logits: Tensor, x_weak: Tensor, shift: Tensor | float = 0.0) -> PseudoLabels:
        """Targets between the classes of the two models, for the images that one of them is
        confident of.
        """
        with torch.no_grad():
            received = at_least_float32(self.received["network"](x_weak))
        return corrected_labels(logits + shift, received + shift, self.threshold, self.kappa)

    def unlabeled_loss(self, logits: Tensor, pseudo: PseudoLabels) -> Tensor:
        """``sum(mask KL(target || strong)) / batch``."""
        return (kl_divergence(logits, pseudo.labels) * pseudo.mask).mean()


def corrected_labels(
    logits: Tensor, received: Tensor, threshold: float, kappa: float
) -> PseudoLabels:
    """Targets between the classes of two models: the larger the gap of the confidences, the nearer
    to the received one.

    Args:
        logits: Of the model in training, ``(n, classes)``.
        received: Logits of the global model, ``(n, classes)``.
        threshold: tau.
        kappa: Sensitivity to the gap.

    Returns:
        Probabilities ``(n, classes)``, the larger confidence, and whether it is at least tau.
    """
    of_client = pseudo_label(logits, threshold)
    of_global_model = pseudo_label(received, threshold)
    share = (
        torch.exp(-kappa * (of_client.confidence - of_global_model.confidence).abs())
        * of_client.mask
    )
    y_own, y_other = (
        F.one_hot(labels, logits.shape[-1]) for labels in (of_client.labels, of_global_model.labels)
    )
    target = share.unsqueeze(-1) * y_own + (1 - share).unsqueeze(-1) * y_other
    return PseudoLabels(
        target,
        torch.maximum(of_client.confidence, of_global_model.confidence),
        of_client.mask | of_global_model.mask,
    )
