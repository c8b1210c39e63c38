"""Fed-MT: federated averaging with a Mean Teacher at every client.

A. Tarvainen, H. Valpola, "Mean teachers are better role models: Weight-averaged consistency targets
improve semi-supervised deep learning results", NIPS 2017, arXiv 1703.01780, combined with FedAvg as
a baseline of Fed-SHVR (arXiv 2111.00010, section V), which does not give details of the
combination; all details are ours.

A round:

1. the server sends theta to the clients; a client's student and teacher start from it;
2. before each of tau_k steps the teacher follows the student, ``teacher <- decay teacher + (1 -
   decay) student`` with decay ``min(1 - 1/(s + 1), 0.99)`` at step s = 0, 1, ..; the student then
   makes a step on ``CE(labelled) + alpha_0 mean over images of (1/C) ||softmax(student) -
   softmax(teacher)||^2``;
3. the students are uploaded and averaged, weighted by the number of images; the teachers are
   discarded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.labeled_unlabeled import PairedBatches
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import call_with_weights
from lightning_fedssl.functional.ema import warm_decay
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class MeanTeacher(PairedBatches):
    """FedAvg with a Mean Teacher at clients that hold labelled and unlabelled images; alpha_0
    weighs the consistency.

    Args:
        decay: Largest decay of the teacher.

    Example:
        >>> from lightning_fedssl import CNN
        >>> MeanTeacher(network=CNN, decay=0.999, client_epochs=1).client_epochs
        1
    """

    needs = "loss"
    no_static_batch_norm = checks.HAS_TEACHER
    local_modules = frozenset({"teacher"})

    decay: float = 0.99

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.decay(self, "decay")

    def build_parts(self) -> None:
        """Build the teacher."""
        self.teacher = Teacher({"network": self.network})

    def on_client_start(self, data: LocalData) -> LocalWork:
        """The teacher starts from the received model; draw tau_k batches."""
        self.teacher.follow({"network": self.network}, 0.0)
        return super().on_client_start(data)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update the teacher; then the student learns from the labels and from the teacher."""
        self.teacher.follow({"network": self.network}, warm_decay(batch_idx, self.decay))
        return super().training_step(batch, batch_idx)

    def unlabeled_terms(self, logits: Tensor, batch: Batch) -> list[Tensor]:
        """The squared distance between the student's and the teacher's predictions."""
        distances = self.task.distances(logits, self.teach(batch["u"]))
        return [(batch["alpha0"] * distances).mean()]

    @torch.no_grad()
    def teach(self, u: Tensor) -> Tensor:
        """The teacher's logits ``(batch, classes)``; the student's buffers do not change.

        The teacher's weights run through the student's layers in training mode, with dropout and
        batch statistics.
        """
        weights: State = dict(self.teacher["network"].named_parameters())
        logits: Tensor = call_with_weights(self.network, weights, u)
        return logits
