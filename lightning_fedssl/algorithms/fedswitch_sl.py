"""FedSwitch-SL: split federated learning in which the student or the teacher labels, as in
FedSwitch.

A baseline of Semi-SFL (Z. Sun et al., arXiv 2307.15870, section V-B): the same pipeline without
projection head, queues and contrastive losses, and with FedSwitch's choice between teacher and
student (J. Zhao et al., arXiv 2301.10114). So it is an ablation of Semi-SFL's clustering. Neither
paper publishes the rule of the choice; this rule is ours.

A round differs from :mod:`lightning_fedssl.algorithms.common.split_learning` in two things:

* before its first step a client uploads the received student's features of a sample of its images.
  The server computes their mean class probabilities p and ``D = KL(p || uniform)``. If D is at most
  beta, the student labels this client's images as it trains. Otherwise the teacher labels them, and
  the client downloads the teacher's bottom;
* a client whose images the teacher labels updates its teacher's bottom at every step as a moving
  average of its student's (local teacher adaptation).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_fedssl.algorithm import JointStep
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.split_learning import SplitTraining
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State, sizes_of
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.dictionaries import exclude, map_values, starting_with, tensors_of
from lightning_fedssl.functional.losses import consistency_losses
from lightning_fedssl.functional.pseudo_labels import pseudo_label, skew_of
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters

_DECISION_IMAGES = 256
"""Images whose features a client sends for the decision, drawn anew each round."""


@hyperparameters
class FedSwitchSL(SplitTraining):
    """Split federated learning with a FedSwitch-style choice of the model that labels.

    Args:
        beta: The largest skew D, in nats, for which the student labels; 0: always the teacher,
            infinity: always the student. The default is arbitrary: tune it.
        server_steps: K_s; null: adapted by ``GlobalUpdateFrequency``.
        client_teacher_decay: gamma_c, the decay of the local teacher adaptation; null: the
            teacher's bottom does not change.
    """

    beta: float = 0.1
    server_steps: int | None = 50
    client_teacher_decay: float | None = 0.99

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 0, "beta")

    def broadcast(self, client: int) -> State:
        """The student's bottom; the teacher's is downloaded later if the decision requires it."""
        bottoms = super().broadcast(client)
        return exclude(bottoms, starting_with("teacher.", bottoms))

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Decide which model labels the client's images; the working module holds the broadcast."""
        work = super().on_client_start(data)
        if not work.num_steps:
            return work
        skew = float(self.prediction_skew(data))
        by_teacher = skew > self.beta
        self.log("client/prediction_skew", skew)
        self.log("client/teacher_share", float(by_teacher))
        if by_teacher:
            teacher = starting_with("teacher.", super().broadcast(data.party))
            self.federation.transfer(data.party, "down", sizes_of(teacher))
        flags = torch.full(
            (data.batch_size,), float(by_teacher), dtype=data.dtype, device=data.images.device
        )
        return replace(work, batch=lambda step: {**work.batch(step), "by_teacher": flags})

    def prediction_skew(self, data: LocalData) -> Tensor:
        """D of a client's images, computed with the working module, in nats."""
        order = data.permutation(len(data.unlabeled), "decision")[:_DECISION_IMAGES]
        with evaluating(self.network):
            features = self.network.bottom(data.plain(data.unlabeled[order]))
            self.federation.transfer(data.party, "up", {"decision features": features.nbytes})
            return skew_of(self.network.top(features))

    @torch.no_grad()
    def teacher_features(self, batch: Batch) -> Tensor:
        """Features of the weak view, computed in evaluation mode by the bottom of the model that
        labels.
        """
        bottom = self.teacher_bottom
        by_teacher = batch["by_teacher"][0] > 0
        source = map_values(
            lambda teacher, student: torch.where(by_teacher, teacher, student),
            tensors_of(bottom),
            tensors_of(self.network.bottom),
        )
        features: Tensor = functional_call(bottom, source, batch["x_weak"])
        return features

    def client_features(self, batch: Batch, batch_idx: int) -> State:
        """Student features, features of the model that labels, and a flag for this model."""
        return {**super().client_features(batch, batch_idx), "by_teacher": batch["by_teacher"]}

    def step_sizes(self, client: int, features: State) -> tuple[Sizes, Sizes]:
        """Bytes of the features; the server decided the flag, so it is not sent."""
        return super().step_sizes(client, exclude(features, ["by_teacher"]))

    def joint_training_step(self, features: State, batch_idx: int) -> JointStep:
        """H on the features of all clients, each labelled by the top of the model that labels."""
        student, labeling, by_teacher = (
            features[name].flatten(0, 1) for name in ("student", "teacher", "by_teacher")
        )
        with evaluating(self.network.top):
            teacher_logits = self.teacher_top(labeling)
            student_logits = self.network.top(labeling)
            pseudo = pseudo_label(
                torch.where(by_teacher[:, None] > 0, teacher_logits, student_logits), self.threshold
            )
        losses = consistency_losses(self.network.top(student), pseudo)
        return JointStep(losses.mean(), pseudo, losses)
