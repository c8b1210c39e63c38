"""Fed-Pseudo: federated averaging with pseudo-labels from the model that is being trained.

D.-H. Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural
Networks", ICML 2013 workshop, combined with FedAvg as a baseline of Fed-SHVR (arXiv 2111.00010,
section V), which does not give details of the combination; all details are ours.

A round:

1. the server sends theta to the clients;
2. each takes tau_k steps on ``CE(labelled) + alpha_0 CE(unlabelled, argmax f)``, with labels from
   the same forward pass;
3. the server averages, weighted by the number of images.
"""

from __future__ import annotations

from torch import Tensor

from lightning_fedssl.algorithms.common.labeled_unlabeled import PairedBatches
from lightning_fedssl.state import Batch


class PseudoLabel(PairedBatches):
    """FedAvg with pseudo-labelling at clients that hold labelled and unlabelled images.

    The arguments are those of
    :class:`~lightning_fedssl.algorithms.common.labeled_unlabeled.PairedBatches`.
    """

    def unlabeled_terms(self, logits: Tensor, batch: Batch) -> list[Tensor]:
        """``alpha_0 CE(u, argmax f(u))``."""
        losses = self.task.entry_losses(logits, logits.detach().argmax(dim=-1))
        return [(batch["alpha0"] * losses).mean()]
