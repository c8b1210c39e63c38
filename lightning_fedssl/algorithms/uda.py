"""FedAvg and FedProx with UDA at the clients: a baseline of FedMatch.

Q. Xie, Z. Dai, E. Hovy, M.-T. Luong, Q. V. Le, "Unsupervised Data Augmentation for Consistency
Training", NeurIPS 2020, arXiv 1904.12848, combined with federated averaging as a baseline of
FedMatch (ICLR 2021, Table 1), whose code for it is not published.

A round is that of :mod:`lightning_fedssl.algorithms.fixmatch`; a step differs in two losses:

* the target of the strong view is the whole distribution of the weak one, sharpened by a
  temperature, where the model is confident: ``lambda_u sum(mask KL(softmax(weak / T) || strong)) /
  batch``;
* labelled images whose true class already has a probability above a threshold are left out of
  ``CE``, so that it does not overfit the few labels (training signal annealing). The threshold
  grows over the rounds from chance to 1: ``eta = a (1 - 1/K) + 1/K``, with K classes and, at the
  fraction x of the run, a of ``1 - exp(-5 x)`` (``log``), ``x`` (``linear``) or ``exp(5 (x - 1))``
  (``exp``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.fixmatch import FixMatch
from lightning_fedssl.functional.losses import masked_mean
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.storage.hyperparameters import hyperparameters

Annealing = Literal["none", "log", "linear", "exp"]

_RELEASED: dict[str, Callable[[float], float]] = {
    "none": lambda x: 1.0,
    "log": lambda x: 1 - math.exp(-5 * x),
    "linear": lambda x: x,
    "exp": lambda x: math.exp(5 * (x - 1)),
}


@hyperparameters
class UDA(FixMatch):
    """FedAvg with UDA at the clients; FedProx with ``prox_mu`` above 0.

    Args:
        temperature: T of the weak views' distribution; below 1 it is sharpened.
        threshold: The confidence from which an unlabelled image is trained on (inclusive), before
            sharpening.
        signal_annealing: How the threshold for labelled images grows: ``exp`` for few labels, as
            FedMatch has it; ``none`` trains on all of them from the start.
    """

    needs = "classes"
    released = 1.0

    temperature: float = 0.4
    threshold: float = 0.8
    signal_annealing: Annealing = "exp"

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.above_zero(self, "temperature")

    def on_round_start(self) -> None:
        """Set a, the share by which the threshold for labelled images has grown."""
        self.released = _RELEASED[self.signal_annealing](self.current_round.progress)

    def labeled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the images whose probability is below the threshold; 0 if there
        is none.
        """
        p, chance = self.task.true_probability(logits.detach(), labels)
        used = (p <= self.released * (1 - chance) + chance) & self.task.known(labels)
        return masked_mean(self.task.labeled_losses(logits, labels), used)

    def label(self, logits: Tensor, x_weak: Tensor, shift: Tensor | float = 0.0) -> PseudoLabels:
        """Sharpened probabilities ``(batch, classes)``, with the mask of the unsharpened ones."""
        logits = logits + shift
        return self.task.label(logits, self.threshold)._replace(
            labels=self.task.probabilities(logits / self.temperature)
        )

    def unlabeled_loss(self, logits: Tensor, pseudo: PseudoLabels) -> Tensor:
        """``sum(mask KL(label || strong)) / batch``."""
        return (self.task.divergences(logits, pseudo.labels) * pseudo.mask).mean()
