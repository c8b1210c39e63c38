"""Semi-SFL: split federated learning with clustering regularisation.

Z. Sun, Y. Xu, H. Xu, Z. Wang, Y. Liao, "Efficient Semi-Supervised Federated Learning for
Heterogeneous Participants", arXiv 2307.15870.

A round (Algorithm 1; :mod:`lightning_fedssl.algorithms.common.split_learning` has the parts without
a contrastive loss):

1. K_s times at the server, on a labelled batch in two views: ``l_s = H + T`` (Eq. 4), the
   cross-entropy of the first view, and a contrastive loss (Eq. 3) of its projections against the
   teacher's projections of the second view and the supervised queue; then the server makes a step,
   updates the teacher, and appends the batch's keys (the teacher's projections) to the queue;
2. the bottoms of student and teacher are sent to the drawn clients;
3. K_u times on the features of all clients: the teacher labels the weak views; ``l_u = H + C`` (Eq.
   6), the cross-entropy of the confident strong views, and the same contrastive loss (Eq. 5) of all
   of them, confident or not, against the teacher's keys of the batch and of both queues; confident
   keys with the same label are the positives. The server makes a step of top and head, sends the
   gradients of the features to the clients, and appends the keys to the unlabelled queue, and at
   steps F, 2F, .. also to the supervised queue;
4. bottoms are averaged; K_s is adapted (Eq. 9, ``GlobalUpdateFrequency``); the global teacher is
   evaluated.

The contrastive losses train head and bottom, not the top. Deviations, with options for the other
variants: the queues are not cleared (the code empties both after every step of stage 2, so that the
paper's "two-level" queue has no effect); empty places of a queue are ignored (in the code they are
zero vectors); keys keep their confidence in the queue (in the code all keys in the supervised queue
are confident); the clients' teacher bottoms do not change during local training, as in the code
(Eq. 8 updates them: ``client_teacher_decay``), and are in evaluation mode (in the code, batch norm
is in training mode); an anchor's own key is a positive, as in the code and Eq. 5 (not in Eq. 3).
K_s starts at 80, which with the code's milestones gives the paper's mean; the paper prints no first
value. Labels are class-balanced; the code draws them in proportion to the classes' sizes. IID
shares are drawn uniformly (``Iid``); the code gives each client an equal share of every class.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import JointStep
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.split_learning import SplitTraining
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.contrastive import References, contrastive_loss
from lightning_fedssl.functional.losses import consistency_losses
from lightning_fedssl.functional.pseudo_labels import pseudo_label
from lightning_fedssl.models.memory_queue import MemoryQueue
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class SemiSFL(SplitTraining):
    """Semi-SFL with its ablations.

    Args:
        clustering: Weight of C, the clustering regularisation; 0 leaves it out.
        supervised_contrastive: Weight of T, the supervised contrastive loss; 0 leaves it out.
        temperature: kappa, the temperature of the contrastive losses.
        projection_size: Length of a projection.
        queue_size: Places of each of the two queues: 640 on CIFAR-10, 2,048 on SVHN.
        queue_every: F: the interval, in steps of stage 2, of appending keys to the supervised
            queue.
        queue_clear: When the queues are emptied; the authors' code does it after ``every_step`` of
            stage 2.
        queue_confidence: Whether keys from stage 2 in the supervised queue keep their ``true``
            confidence, or are ``always`` treated as confident, as in the authors' code.
        queue_empty: Whether empty places are ``masked``, or ``count`` as zero vectors, as in the
            authors' code.
        own_key: Whether an anchor's other view is among T's references; Eq. 3 leaves it out.
    """

    clustering: float = 1.0
    supervised_contrastive: float = 1.0
    temperature: float = 0.2
    projection_size: int = 128
    queue_size: int = 2048
    queue_every: int = 10
    queue_clear: Literal["never", "every_step"] = "never"
    queue_confidence: Literal["true", "always"] = "true"
    queue_empty: Literal["masked", "count"] = "masked"
    own_key: bool = True

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 0, "clustering", "supervised_contrastive")
        checks.above_zero(self, "temperature")
        checks.at_least(self, 1, "projection_size")
        checks.at_least(self, 1, "queue_size", "queue_every")

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse a queue that is smaller than a batch."""
        super().check_data(data)
        batch = max(data.server_batch_size, data.client_batch_size)
        checks.require(
            self.queue_size >= batch,
            "queue_size",
            self.queue_size,
            f"give {batch} or more, a batch",
        )

    def build_head(self) -> None:
        """The projection head w_p, with weights that are a function of the seed, and the queues."""
        with evaluating(self.network):
            features = self.embed(torch.zeros(1, *(self.in_shape or ()))).shape[1]
        with sampling.seeded("projection head"):
            self.head = nn.Sequential(
                nn.Flatten(),
                nn.Linear(features, features),
                nn.ReLU(),
                nn.Linear(features, self.projection_size),
            )
        self.supervised_queue = MemoryQueue(self.queue_size, self.projection_size)
        self.unlabeled_queue = MemoryQueue(self.queue_size, self.projection_size)

    def students(self) -> dict[str, nn.Module]:
        """The network and the projection head: the teacher has a copy of both."""
        return {**super().students(), "head": self.head}

    def server_training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """H + T (Eq. 4), with H logged by itself.

        Appends the batch's keys to the supervised queue.
        """
        features = self.network.bottom(batch["x"])
        loss = self.task.labeled_loss(self.network.top(features), batch["y"])
        self.log("server/cross_entropy", loss, batch_size=len(batch["y"]))
        with torch.no_grad():
            teacher = self.teacher_bottom(batch["x_key"])
            keys = References.all_valid(F.normalize(self.teacher["head"](teacher)), batch["y"])
        if self.supervised_contrastive:
            references = References.cat(keys, self._queued(self.supervised_queue))
            z = F.normalize(self.head(features))
            contrast = contrastive_loss(
                z, batch["y"], references, self.temperature, own_key=self.own_key
            )
            loss = loss + self.supervised_contrastive * contrast.mean()
        self.supervised_queue.push(keys)
        return loss

    def joint_training_step(self, features: State, batch_idx: int) -> JointStep:
        """H + C (Eq. 6) on the features of all clients; appends their keys to the queues."""
        student, teacher = (features[name].flatten(0, 1) for name in ("student", "teacher"))
        with torch.no_grad():
            pseudo = pseudo_label(self.teacher_top(teacher), self.threshold)
            keys = References.all_valid(
                F.normalize(self.teacher["head"](teacher)), pseudo.labels, pseudo.mask
            )
        losses = consistency_losses(self.network.top(student), pseudo)
        loss = losses.mean()
        if self.clustering:
            queued = list(map(self._queued, (self.unlabeled_queue, self.supervised_queue)))
            z = F.normalize(self.head(student))
            clusters = contrastive_loss(
                z, pseudo.labels, References.cat(keys, *queued), self.temperature
            )
            loss = loss + self.clustering * clusters.mean()
            losses = losses + self.clustering * clusters
        self._push(keys, batch_idx)
        return JointStep(loss, pseudo, losses)

    def _queued(self, queue: MemoryQueue) -> References:
        all_confident = queue is self.supervised_queue and self.queue_confidence == "always"
        return queue.references(
            all_confident=all_confident, empty_count=self.queue_empty == "count"
        )

    def _push(self, keys: References, step: int) -> None:
        """Append keys of stage 2: to the unlabelled queue at every step, to the supervised one at
        every F-th.
        """
        self.unlabeled_queue.push(keys)
        if (step + 1) % self.queue_every == 0:
            self.supervised_queue.push(keys)
        if self.queue_clear == "every_step":
            self.unlabeled_queue.clear()
            self.supervised_queue.clear()
